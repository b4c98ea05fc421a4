# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The figures of one compiled train step, with the content and the loop depth of its collectives."""

from __future__ import annotations

import collections
from collections.abc import Sequence
import pathlib
from typing import Any

from maxtext_pp_ext.compiled import carried, child, hlo, limits, spans, step, traffic
from maxtext_pp_ext.compiled.projection import picture, summary, trace
from maxtext_pp_ext.plan import chips
from maxtext_pp_ext.processes import interruption

UNTOLD = "not told"


def figures(
    arguments: Sequence[str],
    *,
    bounds: limits.Limits,
    batch: str,
    optimizer: str,
    devices: child.Devices = None,
    chip: chips.Chip | None = None,
    trace_file: pathlib.Path | None = None,
    picture_file: pathlib.Path | None = None,
    on_tick: child.OnTick = lambda seconds, memory: None,
) -> dict[str, Any]:
  """Compiles a train step in a separate process.

  Args:
    arguments: MaxText's command-line arguments.
    bounds: limits of wall time and host memory.
    batch: prefix of the names of those arguments of the step that are the batch.
    optimizer: prefix of the names of those arguments of the step that are the optimizer's state.
    devices: those to compile for, see `step.compile_step`.
    chip: device for which the step's time is projected; None for no projection.
    trace_file: file for the projected step in Chrome's trace format, gzipped.
    picture_file: file for a picture of one of its iterations in each direction, an SVG or PNG.
    on_tick: called regularly with the seconds so far and the resident bytes now.

  Returns:
    The figures of `step.compile_step`, `transfers` and `overlap`; or `failure`, as there. `transfers` lists the
    collectives per device and step, by what they carry, kind and loop depth. `overlap` has the shares of their bytes that
    are transferred asynchronously, and with compute meanwhile. With a chip also `projection`, see
    `projection.summary.figures`.
  """
  with interruption.temporary_folder() as folder:
    file = pathlib.Path(folder) / "step.hlo"
    found = step.compile_step(arguments, bounds=bounds, hlo_file=file, devices=devices, on_tick=on_tick)
    if "failure" in found:
      return found
    text = file.read_text(encoding="utf-8")
  try:
    module = hlo.program(text)
    found |= of_module(module, batch=batch, optimizer=optimizer)
    if chip is not None:
      simulated = summary.simulate(module, chip, found.pop("placement"), batch=batch, optimizer=optimizer)
      found["projection"] = summary.figures(simulated, chip, found["work"])
      title = f"{' '.join(arguments)}: projected from the compiler's estimates"
      if trace_file:
        trace.write(simulated.step, trace_file, title=title)
      if picture_file:
        picture.draw(simulated.step, picture_file, "One iteration of each direction")
    return found
  except hlo.HloError as error:
    return {"failure": f"the compiled program cannot be read. {error}", "unread": True}


def of_program(text: str, *, batch: str, optimizer: str) -> dict[str, Any]:
  """`transfers` and `overlap` of an HLO program.

  Raises:
    HloError: the text is not that of a whole program, or contains something unknown.
  """
  return of_module(hlo.program(text), batch=batch, optimizer=optimizer)


def of_module(module: hlo.Module, *, batch: str, optimizer: str) -> dict[str, Any]:
  """The same of a program that has been read."""
  with hlo.reading():
    collectives = spans.spans(module)
    kinds = carried.carried(module, collectives, batch=batch, optimizer=optimizer)
    return {"transfers": transfers(collectives, kinds), "overlap": overlap(collectives)}


def transfers(collectives: Sequence[spans.Span], what: Sequence[str | None]) -> list[dict[str, Any]]:
  """Bytes on the wire and executions, by what is carried, kind and loop depth; the most bytes first."""
  sums: dict[tuple[str, str, int], list[float]] = collections.defaultdict(lambda: [0.0, 0.0, 0])
  for span, carries in zip(collectives, what, strict=True):
    entry = sums[carries or UNTOLD, span.collective.kind, span.depth]
    entry[0] += span.wire_bytes
    entry[1] += span.collective.balanced_bytes * span.executions
    entry[2] += span.executions
  rows = []
  for (carries, kind, depth), (wire, balanced, count) in sums.items():
    row = {"carries": carries, "kind": kind, "loop_depth": depth, "wire_bytes": round(wire), "count": count}
    rows.append(row | ({"balanced_bytes": round(balanced)} if kind == traffic.RAGGED else {}))
  return sorted(rows, key=lambda row: (-row["wire_bytes"], row["carries"], row["kind"], row["loop_depth"]))


def overlap(collectives: Sequence[spans.Span]) -> dict[str, float | None]:
  """Shares of the bytes that are transferred asynchronously, and with compute between start and done."""
  total = sum(span.wire_bytes for span in collectives)

  def share(chosen: Sequence[spans.Span]) -> float | None:
    return round(sum(span.wire_bytes for span in chosen) / total, 3) if total else None

  return {
      "asynchronous": share([span for span in collectives if span.asynchronous]),
      "compute_meanwhile": share([span for span in collectives if span.meanwhile]),
  }


def wire_bytes(row: dict[str, Any], **chosen: Any) -> int:
  """The bytes of a row's transfers that have these values."""
  found = (each for each in row["transfers"] if all(each[key] == value for key, value in chosen.items()))
  return sum(each["wire_bytes"] for each in found)

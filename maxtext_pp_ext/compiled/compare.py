# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The figures of one compiled train step, with the content and the loop depth of its collectives."""

from collections.abc import Sequence
import pathlib
from typing import Any

from maxtext_pp_ext.compiled import child, limits, reading, spans, traffic
from maxtext_pp_ext.compiled.program import collectives, hlo
from maxtext_pp_ext.compiled.projection import picture, summary, trace
from maxtext_pp_ext.hardware import chips
from maxtext_pp_ext.processes import interruption

UNTOLD = "not told"


def figures(
    arguments: Sequence[str],
    *,
    bounds: limits.Limits,
    devices: child.Devices = None,
    chip: chips.Chip | None = None,
    hlo_file: pathlib.Path | None = None,
    trace_file: pathlib.Path | None = None,
    picture_file: pathlib.Path | None = None,
    on_tick: child.OnTick = lambda seconds, memory: None,
) -> dict[str, Any]:
  """Compiles a train step in a separate process.

  Args:
    arguments: MaxText's command-line arguments.
    bounds: limits of wall time and host memory.
    devices: those to compile for, see `child.compile_step`.
    chip: device for which the step's time is projected; None for no projection.
    hlo_file: file to keep the optimised HLO in.
    trace_file: file for the projected step in Chrome's trace format, gzipped.
    picture_file: file for a picture of one of its iterations in each direction, an SVG or PNG.
    on_tick: called regularly with the seconds so far and the resident bytes now.

  Returns:
    What `child.compile_step` returns, without `placement` and `names`, and what `of_step` returns. With a chip also
    `projection`, see `projection.summary.figures`. Or `failure`; and `unread` if the step was compiled and its program
    could not be read.
  """
  with interruption.temporary_folder() as folder:
    file = hlo_file or pathlib.Path(folder) / "step.hlo"
    found = child.compile_step(arguments, bounds=bounds, hlo_file=file, devices=devices, on_tick=on_tick)
    if "failure" in found:
      return found
    text = file.read_text(encoding="utf-8")
  placement = found.pop("placement", None)
  try:
    read = reading.step(text, **found.pop("names"))
    found |= of_step(read)
    if chip is not None:
      simulated = summary.simulate(read, chip, placement)
      found["projection"] = summary.figures(simulated, chip, found["work"])
      title = f"{' '.join(arguments)}: projected from the compiler's estimates"
      if trace_file:
        trace.write(simulated.step, trace_file, title=title)
      if picture_file:
        picture.draw(simulated.step, picture_file, "One iteration of each direction")
    return found
  except hlo.HloError as error:
    return {"failure": f"the compiled program cannot be read. {error}", "unread": True}


def of_step(read: reading.Step) -> dict[str, Any]:
  """What a train step sends and multiplies.

  Of `traffic.Traffic` all. `loops_without_trip_count` and `conditionals_unknown` could not be followed. `transfers` lists
  the collectives per device and step, by what they carry, kind and loop depth. `overlap` has the shares of their bytes
  that are transferred asynchronously, and with compute meanwhile.
  """
  with hlo.reading():
    return {
        **traffic.analyse(read.run, read.collectives).to_json(),
        "loops_without_trip_count": sorted(read.run.unknown.loops),
        "conditionals_unknown": sorted(read.run.unknown.conditionals),
        "transfers": transfers(read.collectives, read.carries),
        "overlap": overlap(read.collectives),
    }


def transfers(found: Sequence[spans.Span], what: Sequence[str | None]) -> list[dict[str, Any]]:
  """Bytes on the wire and executions, by what is carried, kind and loop depth; the most bytes first."""
  alike: dict[tuple[str, str, int], list[spans.Span]] = {}
  for span, carries in zip(found, what, strict=True):
    alike.setdefault((carries or UNTOLD, span.collective.kind, span.depth), []).append(span)
  rows = []
  for (carries, kind, depth), group in alike.items():
    row = {"carries": carries, "kind": kind, "loop_depth": depth, "wire_bytes": round(sum(s.wire_bytes for s in group))}
    row["count"] = traffic.count_of(sum(span.executions for span in group))
    balanced = sum(span.collective.balanced_bytes * span.executions for span in group)
    rows.append(row | ({"balanced_bytes": round(balanced)} if kind == collectives.RAGGED else {}))
  return sorted(rows, key=lambda row: (-row["wire_bytes"], row["carries"], row["kind"], row["loop_depth"]))


def overlap(found: Sequence[spans.Span]) -> dict[str, float | None]:
  """Shares of the bytes that are transferred asynchronously, and with compute between start and done."""
  total = sum(span.wire_bytes for span in found)

  def share(chosen: Sequence[spans.Span]) -> float | None:
    return round(sum(span.wire_bytes for span in chosen) / total, 3) if total else None

  return {
      "asynchronous": share([span for span in found if span.asynchronous]),
      "compute_meanwhile": share([span for span in found if span.meanwhile]),
  }


def wire_bytes(row: dict[str, Any], **chosen: Any) -> int:
  """The bytes of a row's transfers that have these values."""
  found = (each for each in row["transfers"] if all(each[key] == value for key, value in chosen.items()))
  return sum(each["wire_bytes"] for each in found)

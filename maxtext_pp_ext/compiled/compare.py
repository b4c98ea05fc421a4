# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The figures of one compiled train step: what it sends and multiplies, and its projected time."""

import collections
from collections.abc import Hashable, Iterable, Mapping, Sequence
import json
import pathlib
from typing import Any

from maxtext_pp_ext.compiled import child, limits, reading, spans
from maxtext_pp_ext.compiled.program import collectives, hlo, products
from maxtext_pp_ext.compiled.projection import costs, picture, timeline, torus, trace
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
    kept_file: pathlib.Path | None = None,
    trace_file: pathlib.Path | None = None,
    picture_file: pathlib.Path | None = None,
    on_tick: child.OnTick = lambda seconds, memory: None,
) -> dict[str, Any]:
  """Compiles a train step in a separate process; see `child.compile_step`, also for the other arguments.

  Args:
    chip: device for which the step's time is projected; None for no projection.
    hlo_file: file to keep the optimised HLO in.
    kept_file: file to keep what the compiler says in, for `of_kept`.
    trace_file: file for the projected step in Chrome's trace format, gzipped.
    picture_file: file for a picture of one of its iterations in each direction, an SVG or PNG.

  Returns:
    What `child.compile_step` returns, without `placement` and `names`, and what `of_step` returns. With a chip also
    `projection`, see `of_projection`; that has `at_nominal_rate_s` if `at_nominal_rate` is not None. Or `failure`; and
    `unread` if the step was compiled and its program could not be read.
  """
  with interruption.temporary_folder() as folder:
    file = hlo_file or pathlib.Path(folder) / "step.hlo"
    if kept_file:
      kept_file.unlink(missing_ok=True)
    found = child.compile_step(arguments, bounds=bounds, hlo_file=file, devices=devices, on_tick=on_tick)
    if kept_file:
      kept_file.write_text(json.dumps(_origin(arguments) | {"found": found}), encoding="utf-8")
    if "failure" in found:
      return found
    text = file.read_text(encoding="utf-8")
  title = f"{' '.join(arguments)}: projected from the compiler's estimates"
  return _of_program(found, text, chip, title, trace_file, picture_file)


def of_kept(
    arguments: Sequence[str], *, chip: chips.Chip | None, hlo_file: pathlib.Path, kept_file: pathlib.Path
) -> dict[str, Any]:
  """What `figures` returns, of a program that an earlier call has kept in these files, or of its failure.

  It says nothing about what has changed in the package since then.

  Raises:
    ValueError: there is no such program, or it is one of other arguments or versions.
  """
  try:
    kept = json.loads(kept_file.read_text(encoding="utf-8"))
  except OSError as error:
    raise ValueError(f"no program of {' '.join(arguments)} has been kept: {error}") from error
  for key, value in _origin(arguments).items():
    if kept[key] != value:
      raise ValueError(f"{hlo_file} is a program of other {key}: {kept[key]} instead of {value}")
  if "failure" in kept["found"]:
    return kept["found"]
  return _of_program(kept["found"], hlo_file.read_text(encoding="utf-8"), chip)


def _origin(arguments: Sequence[str]) -> dict[str, Any]:
  return {"arguments": [*arguments], "versions": child.versions()}


def _of_program(
    found: dict[str, Any],
    text: str,
    chip: chips.Chip | None,
    title: str = "",
    trace_file: pathlib.Path | None = None,
    picture_file: pathlib.Path | None = None,
) -> dict[str, Any]:
  """The figures of a program, from what `child.compile_step` has found."""
  placement = found.pop("placement", None)
  try:
    read = reading.step(text, **found.pop("names"))
    found |= of_step(read)
    if chip is not None:
      simulated = simulate(read, chip, placement)
      found["projection"] = of_projection(simulated, chip, found["work"])
      if (seconds := at_nominal_rate(read, chip, placement)) is not None:
        found["projection"]["at_nominal_rate_s"] = seconds
      if trace_file:
        trace.write(simulated.step, trace_file, title=title)
      if picture_file:
        picture.draw(simulated.step, picture_file, "One iteration of each direction")
    return found
  except hlo.HloError as error:
    return {"failure": f"the compiled program cannot be read. {error}", "unread": True}


def of_step(read: reading.Step) -> dict[str, Any]:
  """What a train step sends and multiplies, per device and step.

  Returns:
    `wire_GB` and `count` of the collectives, by kind, and `wire_total_GB`. `balanced_ragged_GB`: of ragged all-to-alls
    what is sent if all devices get equally many rows. `weight_gathers`: all-gathers executed, counted per floating-point
    array of at least `collectives.WEIGHT_BYTES`. `dot_flops` of matrix multiplications and convolutions, without those in
    Pallas kernels. `loops_without_trip_count` and `conditionals_unknown` could not be followed. `transfers` lists the
    collectives by payload, kind and loop depth. `overlap` has the shares of their bytes that are transferred
    asynchronously, and with compute meanwhile.
  """
  with hlo.reading():
    kinds = _grouped(read.collectives, (span.collective.kind for span in read.collectives))
    sent = {kind: sum(span.wire_bytes for span in group) for kind, group in kinds.items()}
    return {
        "wire_GB": {kind: round(size / 1e9, 3) for kind, size in sorted(sent.items())},
        "wire_total_GB": round(sum(sent.values()) / 1e9, 3),
        "balanced_ragged_GB": round(_balanced_bytes(kinds.get(collectives.RAGGED, ())) / 1e9, 3),
        "count": {kind: _count(span.executions for span in group) for kind, group in sorted(kinds.items())},
        "weight_gathers": _count(span.collective.weights * span.executions for span in kinds.get("all-gather", ())),
        "dot_flops": read.run.total(products.dot_flops),
        "loops_without_trip_count": sorted(read.run.unknown.loops),
        "conditionals_unknown": sorted(read.run.unknown.conditionals),
        "transfers": transfers(read.collectives, read.payloads),
        "overlap": overlap(read.collectives),
    }


def transfers(found: Sequence[spans.Span], payloads: Sequence[str | None]) -> list[dict[str, Any]]:
  """Bytes on the wire and executions, by payload, kind and loop depth; the most bytes first."""
  keys = [(payload or UNTOLD, span.collective.kind, span.depth) for span, payload in zip(found, payloads, strict=True)]
  rows = []
  for (payload, kind, depth), group in _grouped(found, keys).items():
    row = {"payload": payload, "kind": kind, "loop_depth": depth, "wire_bytes": round(sum(s.wire_bytes for s in group))}
    row["count"] = _count(span.executions for span in group)
    rows.append(row | ({"balanced_bytes": round(_balanced_bytes(group))} if kind == collectives.RAGGED else {}))
  return sorted(rows, key=lambda row: (-row["wire_bytes"], row["payload"], row["kind"], row["loop_depth"]))


def _grouped[Key: Hashable](found: Iterable[spans.Span], keys: Iterable[Key]) -> dict[Key, list[spans.Span]]:
  groups: dict[Key, list[spans.Span]] = {}
  for span, key in zip(found, keys, strict=True):
    groups.setdefault(key, []).append(span)
  return groups


def _balanced_bytes(found: Iterable[spans.Span]) -> float:
  return sum(span.collective.balanced_bytes * span.executions for span in found)


def _count(executions: Iterable[float]) -> float:
  """A number of executions as it is shown. It is no integer where only some devices execute something."""
  total = sum(executions)
  return round(total) if float(total).is_integer() else round(total, 3)


def overlap(found: Sequence[spans.Span]) -> dict[str, float | None]:
  """Shares of the bytes that are transferred asynchronously, and with compute between start and done."""
  total = sum(span.wire_bytes for span in found)
  share = lambda chosen: round(sum(span.wire_bytes for span in chosen) / total, 3) if total else None
  return {
      "asynchronous": share(span for span in found if span.asynchronous),
      "compute_meanwhile": share(span for span in found if span.meanwhile),
  }


def wire_bytes(row: dict[str, Any], **chosen: Any) -> int:
  """The bytes of a row's transfers that have these values."""
  found = (each for each in row["transfers"] if all(each[key] == value for key, value in chosen.items()))
  return sum(each["wire_bytes"] for each in found)


def simulate(read: reading.Step, chip: chips.Chip, placement: Mapping[str, Any]) -> timeline.Timeline:
  """Simulates one step of a scheduled program, from a text with its tables of integers (`compiled.tasks.printed`).

  The placement is `mesh`, sizes by name in order, and `devices`, [slice, x, y, z] of each partition.

  Raises:
    HloError: the program has something that is not understood.
  """
  with hlo.reading():
    payloads = {(span.where, span.name): each for span, each in zip(read.collectives, read.payloads, strict=True)}
    devices = [torus.Device(slice=each[0], at=tuple(each[1:])) for each in placement["devices"]]
    grid = torus.Torus(devices, link=chip.link, network=chip.network, dimensions=chip.links // 2)
    return timeline.Timeline(read.run, costs.Costs(read.run.module, chip, grid, placement["mesh"], payloads))


def at_nominal_rate(read: reading.Step, chip: chips.Chip, placement: Mapping[str, Any]) -> float | None:
  """Seconds of a step over several slices, if their network has the nominal rate; None if nobody has measured another."""
  slices = {slice_ for slice_, *_ in placement["devices"]}
  if chip.network_measured is None or len(slices) == 1:
    return None
  return simulate(read, chip.with_network(chip.network), placement).step.seconds


def of_projection(simulated: timeline.Timeline, chip: chips.Chip, work: Mapping[str, Any]) -> dict[str, Any]:
  """A step's projected time, and what it goes to.

  The work is `model_flops` and `tokens` of a device and step, and the `bubble_fraction` of the pipeline, 0 without one.

  Returns:
    `step_s`; `parts`, seconds that add up to it; and of these: `bubbles_s`, compute of the pipeline's loops in
    iterations in which a stage idles, None for a pipeline without a loop, and `rematerialisation_s`, what is computed
    again. `busy_s` of each lane. `transfers_s`: of transfers, hidden or not, by the names of their parts. `transfers_GB`:
    what a device sends, likewise; of a ragged all-to-all what it sends if routing is balanced. `tokens_per_s` and
    `tflops_per_s` of a device as MaxText's log counts them, and their share of the chip's peak, `mfu`. `unknown`:
    instructions that could not be followed, see `Timeline`. `is`: what this is.
  """
  run = simulated.step
  parts: dict[str, float] = collections.defaultdict(float)
  for part, seconds in run.parts.items():
    parts[part.what] += seconds
  compute = {part: seconds for part, seconds in run.parts.items() if part.what in costs.COMPUTED}
  bubbles = work["bubble_fraction"]
  in_pipeline = sum(seconds for part, seconds in compute.items() if part.in_pipeline)
  return {
      "is": "a projection from the compiler's estimates, not a measurement",
      "step_s": run.seconds,
      "parts": _largest_first(parts),
      "bubbles_s": in_pipeline * bubbles if in_pipeline or not bubbles else None,
      "rematerialisation_s": sum(seconds for part, seconds in compute.items() if part.again),
      "compute_s": sum(compute.values()),
      "busy_s": _largest_first(run.busy),
      "transfers_s": _largest_first(run.sent),
      "transfers_GB": _largest_first({part: sent / 1e9 for part, sent in run.sent_bytes.items()}),
      "tokens_per_s": work["tokens"] / run.seconds,
      "tflops_per_s": work["model_flops"] / run.seconds / 1e12,
      "mfu": work["model_flops"] / run.seconds / chip.flops,
      "unknown": sorted(simulated.unknown),
  }


def _largest_first(seconds: Mapping[str, float]) -> dict[str, float]:
  return dict(sorted(seconds.items(), key=lambda item: -item[1]))

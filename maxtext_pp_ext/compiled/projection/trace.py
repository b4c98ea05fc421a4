# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Writes a simulated step in Chrome's trace format, which Perfetto (ui.perfetto.dev) and `chrome://tracing` open.

Lanes are threads of one process. Of iterations in a row that are alike, the first few are written; one block, which names
how many, stands for the others. All times are those of the simulation, so the trace is as long as the step.

Format: "Trace Event Format", Google.
"""

from collections.abc import Iterator
import gzip
import json
import pathlib
from typing import Any

from maxtext_pp_ext.compiled.projection import timeline

_LOOPS = "loops"


def write(run: timeline.Run, file: pathlib.Path, *, title: str, shown: int = 2) -> None:
  """Writes a gzipped trace, in which a process with a title has the lanes, and `shown` of iterations that are alike."""
  events = list(_events(run, 0.0, shown, ()))
  lanes = list(dict.fromkeys([_LOOPS, timeline.COMPUTE, *(event["tid"] for event in events)]))
  numbers = {lane: number for number, lane in enumerate(lanes)}
  meta: list[dict[str, Any]] = [{"ph": "M", "pid": 0, "name": "process_name", "args": {"name": title}}]
  for lane, number in numbers.items():
    meta.append({"ph": "M", "pid": 0, "tid": number, "name": "thread_name", "args": {"name": lane}})
    meta.append({"ph": "M", "pid": 0, "tid": number, "name": "thread_sort_index", "args": {"sort_index": number}})
  for event in events:
    event["tid"] = numbers[event["tid"]]
  note = "Projected from the TPU compiler's estimates; nothing was measured."
  content = {"displayTimeUnit": "ms", "otherData": {"note": note}, "traceEvents": meta + events}
  with gzip.GzipFile(file, "wb", mtime=0) as out:
    out.write(json.dumps(content).encode())


def _events(run: timeline.Run, at: float, shown: int, within: tuple[str, ...]) -> Iterator[dict[str, Any]]:
  for event in run.events:
    if isinstance(event, timeline.Loop):
      yield from _loop(event, at + event.start, shown, within)
    else:
      arguments = {"op_name": event.op_name, "kind": event.kind, **event.detail}
      yield _block(event.name, event.lane, at + event.start, event.seconds, arguments | _iteration(within))


def _loop(loop: timeline.Loop, at: float, shown: int, within: tuple[str, ...]) -> Iterator[dict[str, Any]]:
  yield _block(loop.name, _LOOPS, at, loop.seconds, {"op_name": loop.op_name} | _iteration(within))
  number = 0
  for run, count in loop.iterations:
    for i in range(min(count, shown)):
      yield _block(f"iteration {number + i}", _LOOPS, at, run.seconds, {})
      yield from _events(run, at, shown, (*within, f"{loop.name} {number + i}"))
      at += run.seconds
    if count > shown:
      rest = run.seconds * (count - shown)
      yield _block(f"{count - shown} more iterations like it, not drawn", _LOOPS, at, rest, {})
      at += rest
    number += count


def _iteration(within: tuple[str, ...]) -> dict[str, str]:
  return {"iteration": ", ".join(within)} if within else {}


def _block(name: str, lane: str, start: float, seconds: float, arguments: dict[str, Any]) -> dict[str, Any]:
  return {
      "ph": "X", "pid": 0, "tid": lane, "name": name, "ts": start * 1e6, "dur": seconds * 1e6, "args": arguments,
  }  # fmt: skip

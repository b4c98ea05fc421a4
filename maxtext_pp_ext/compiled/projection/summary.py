# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The projection of a compiled train step: how long it takes, and what its time goes to."""

import collections
from collections.abc import Mapping
from typing import Any

from maxtext_pp_ext.compiled import reading
from maxtext_pp_ext.compiled.program import hlo
from maxtext_pp_ext.compiled.projection import costs, timeline, torus
from maxtext_pp_ext.hardware import chips


def simulate(read: reading.Step, chip: chips.Chip, placement: Mapping[str, Any]) -> timeline.Timeline:
  """Simulates one step of a scheduled program, from a text with its tables of integers (`compiled.tasks.printed`).

  The placement is `mesh`, sizes by name in order, and `devices`, [slice, x, y, z] of each partition.

  Raises:
    HloError: the program has something that is not understood.
  """
  with hlo.reading():
    carries = {(span.where, span.name): kind for span, kind in zip(read.collectives, read.carries, strict=True)}
    devices = [torus.Device(slice=each[0], at=tuple(each[1:])) for each in placement["devices"]]
    grid = torus.Torus(devices, link=chip.link, network=chip.network, dimensions=chip.links // 2)
    return timeline.Timeline(read.run, costs.Costs(read.run.module, chip, grid, placement["mesh"], carries))


def figures(simulated: timeline.Timeline, chip: chips.Chip, work: Mapping[str, Any]) -> dict[str, Any]:
  """A step's projection as JSON.

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

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Scheduled programs in HLO text, small enough to add up by hand. Cycles are those of a clock of 1 GHz: nanoseconds."""

import dataclasses

from maxtext_pp_ext.compiled import hlo
from maxtext_pp_ext.compiled.projection import costs, timeline, torus
from maxtext_pp_ext.plan import chips

CHIP = dataclasses.replace(chips.CHIPS["v5p"], clock=1e9, link=1e9, hbm_bandwidth=1e12)
MESH = {"stage": 2, "fsdp": 2}
# Two by two chips: stages along x, fsdp along y. No rings.
DEVICES = [torus.Device(slice=0, at=(0, 0, 0)), torus.Device(slice=0, at=(0, 1, 0))]
DEVICES += [torus.Device(slice=0, at=(1, 0, 0)), torus.Device(slice=0, at=(1, 1, 0))]
GATHER = "replica_groups=mesh['stage'=2,'fsdp'=2] {'fsdp'}, dimensions={0}"


def cycles(count):
  return f'backend_config={{"window_config":{{"estimated_cycles":"{count}"}}}}'


HEAD = """HloModule step, is_scheduled=true, num_partitions=4

%work (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %n = f32[8]{0} negate(%p)
}
"""


def simulated(text, carries=None):
  """The timeline of a program, and its costs, with links that are never idle and without latency."""
  module = hlo.program(text)
  grid = torus.Torus(DEVICES, link=CHIP.link, network=CHIP.network, dimensions=3)
  return timeline.Timeline(module, costs.Costs(module, CHIP, grid, MESH, carries or {}))


def gather_seconds(size):
  """Of an all-gather over two neighbours: half of the array over one link."""
  return size / 2 / (CHIP.link * costs.LINK_EFFICIENCY) + costs.HOP_SECONDS

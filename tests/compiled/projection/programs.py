# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Scheduled programs in HLO text, small enough to add up by hand. Cycles are those of a clock of 1 GHz: nanoseconds."""

import dataclasses

from maxtext_pp_ext.compiled.program import execution, hlo
from maxtext_pp_ext.compiled.projection import costs, timeline, torus
from maxtext_pp_ext.hardware import chips

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


def simulated(text, payloads=None):
  """The timeline of a program, and its costs, with links that are never idle and without latency."""
  module = hlo.program(text)
  grid = torus.Torus(DEVICES, link=CHIP.link, network=CHIP.network, dimensions=3)
  return timeline.Timeline(execution.of_module(module), costs.Costs(module, CHIP, grid, MESH, payloads or {}))


def gather_seconds(size):
  """Of an all-gather over two neighbours: half of the array over one link."""
  return size / 2 / (CHIP.link * chips.LINK_EFFICIENCY) + chips.HOP_SECONDS


def loop(branches, trips=8):
  """A loop whose body takes 1 µs, and in the iterations with `counter mod 4 = stage` 10 µs more."""
  return f"""{HEAD}
%copy (p: f32[8]) -> f32[8] {{
  %p.1 = f32[8]{{0}} parameter(0)
  ROOT %long = f32[8]{{0}} fusion(%p.1), kind=kLoop, calls=%work, {cycles(10_000)}
}}

%keep (p: f32[8]) -> f32[8] {{
  ROOT %p.2 = f32[8]{{0}} parameter(0)
}}

%body (c: (s32[], f32[8])) -> (s32[], f32[8]) {{
  %c = (s32[], f32[8]) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %x = f32[8]{{0}} get-tuple-element(%c), index=1
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %four = s32[] constant(4)
  %mod = s32[] remainder(%i, %four)
  %id = u32[] partition-id()
  %table = s32[4]{{0}} constant({{0, 0, 1, 1}})
  %at = s32[1]{{0}} dynamic-slice(%table, %id), dynamic_slice_sizes={{1}}
  %stage = s32[] reshape(%at)
  {branches}
  %short = f32[8]{{0}} fusion(%y), kind=kLoop, calls=%work, {cycles(1000)}
  ROOT %r = (s32[], f32[8]) tuple(%next, %short)
}}

%condition (c: (s32[], f32[8])) -> pred[] {{
  %c.1 = (s32[], f32[8]) parameter(0)
  %i.1 = s32[] get-tuple-element(%c.1), index=0
  %n = s32[] constant({trips})
  ROOT %less = pred[] compare(%i.1, %n), direction=LT
}}

ENTRY %main (a: f32[8]) -> (s32[], f32[8]) {{
  %a = f32[8]{{0}} parameter(0)
  %zero = s32[] constant(0)
  %init = (s32[], f32[8]) tuple(%zero, %a)
  ROOT %while = (s32[], f32[8]) while(%init), condition=%condition, body=%body
}}
"""


COPIES = "%p.3 = pred[] compare(%mod, %stage), direction=EQ\n  "
BY_PREDICATE = f"{COPIES}%y = f32[8]{{0}} conditional(%p.3, %x, %x), true_computation=%copy, false_computation=%keep"
BY_INDEX = (
    f"{COPIES}%k = s32[] convert(%p.3)\n  " "%y = f32[8]{0} conditional(%k, %x, %x), branch_computations={%keep, %copy}"
)

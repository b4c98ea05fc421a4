# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""A simulated step takes what its instructions take, one after the other or beside each other."""

import pytest

from maxtext_pp_ext.compiled.projection import costs, timeline
from tests.compiled.projection.programs import (
    BY_INDEX,
    BY_PREDICATE,
    COPIES,
    cycles,
    GATHER,
    gather_seconds,
    HEAD,
    loop,
    simulated,
)

MICRO = 1e-6
SHARD, WHOLE = 4096, 8192  # bytes of f32[1024] and f32[2048]


def entry(*lines):
  body = "\n  ".join(lines)
  return f"{HEAD}\nENTRY %main (a: f32[8], w: f32[1024]) -> f32[8] {{\n  %a = f32[8]{{0}} parameter(0)\n  {body}\n}}\n"


W = "%w = f32[1024]{0} parameter(1)"


def work(name, operand, count, opcode="fusion"):
  return f"%{name} = f32[8]{{0}} {opcode}(%{operand}), kind=kLoop, calls=%work, {cycles(count)}"


def test_compute_takes_the_compilers_cycles_at_the_chips_clock():
  step = simulated(entry(W, work("x", "a", 3000), "ROOT " + work("y", "x", 2000))).step
  assert step.seconds == pytest.approx(5 * MICRO)
  assert step.busy == {timeline.COMPUTE: pytest.approx(5 * MICRO)}


def test_a_transfer_without_a_start_stands_in_line_with_compute():
  lines = (W, work("x", "a", 3000), f"%g = f32[2048]{{0}} all-gather(%w), {GATHER}", "ROOT " + work("y", "x", 2000))
  step = simulated(entry(*lines)).step
  assert step.seconds == pytest.approx(5 * MICRO + gather_seconds(WHOLE))
  assert step.parts[timeline.Part(f"{costs.TRANSFERS}: not told over fsdp", False, False, False)] == pytest.approx(
      gather_seconds(WHOLE)
  )


@pytest.mark.parametrize("meanwhile", [1000, 20_000])
def test_a_transfer_with_a_start_and_a_done_costs_what_the_compute_between_them_does_not_hide(meanwhile):
  lines = (
      W,
      f"%s = (f32[1024]{{0}}, f32[2048]{{0}}) all-gather-start(%w), {GATHER}",
      work("x", "a", meanwhile),
      "%g = f32[2048]{0} all-gather-done(%s)",
      "ROOT " + work("y", "x", 2000),
  )
  step = simulated(entry(*lines)).step
  assert step.seconds == pytest.approx(max(meanwhile * 1e-9, gather_seconds(WHOLE)) + 2 * MICRO)
  assert step.sent == {f"{costs.TRANSFERS}: not told over fsdp": pytest.approx(gather_seconds(WHOLE))}


def test_transfers_of_a_loop_count_once_for_each_iteration():
  gather = f"%w = f32[2048]{{0}} all-gather(%x), {GATHER}\n  %y = f32[8]{{0}} slice(%w), slice={{[0:8]}}"
  (seconds,) = simulated(loop(gather, trips=8)).step.sent.values()
  (once,) = simulated(loop(gather, trips=1)).step.sent.values()
  assert seconds == pytest.approx(8 * once)


def test_transfers_over_the_same_links_wait_for_each_other_and_over_others_do_not():
  pairs = "source_target_pairs={{0,2},{2,0},{1,3},{3,1}}"
  both = (
      W,
      f"%s = (f32[1024]{{0}}, f32[2048]{{0}}) all-gather-start(%w), {GATHER}",
      "{}",
      "%g = f32[2048]{0} all-gather-done(%s)",
      "{}",
      "ROOT " + work("y", "a", 1000),
  )
  again = f"%t = (f32[1024]{{0}}, f32[2048]{{0}}) all-gather-start(%w), {GATHER}", "%h = f32[2048]{0} all-gather-done(%t)"
  along = f"%t = (f32[1024]{{0}}, f32[1024]{{0}}) collective-permute-start(%w), {pairs}", (
      "%h = f32[1024]{0} collective-permute-done(%t)"
  )
  fill = lambda pair: entry(*both[:2], pair[0], both[3], pair[1], both[5])
  alone = gather_seconds(WHOLE)
  assert simulated(fill(again)).step.seconds == pytest.approx(2 * alone + MICRO)
  assert simulated(fill(along)).step.seconds == pytest.approx(alone + MICRO)


@pytest.mark.parametrize("branches", [BY_PREDICATE, BY_INDEX])
def test_a_branch_runs_in_the_iterations_in_which_some_device_takes_it(branches):
  """Two stages take it in turns: in 4 of 8 iterations somebody does, and the others wait."""
  found = simulated(loop(branches))
  assert found.step.seconds == pytest.approx((8 + 4 * 10) * MICRO)
  assert not found.unknown
  (loop_event,) = found.step.events
  assert [count for _, count in loop_event.iterations] == [2, 2, 2, 2]
  parts = {part.what: seconds for part, seconds in found.step.parts.items()}
  assert parts[costs.DEVICES] == pytest.approx(4 * 10 * MICRO / 2), "half of the devices take it, the others wait"
  assert parts[costs.OTHER] == pytest.approx((8 + 4 * 10 / 2) * MICRO)


def test_a_branch_that_depends_on_data_is_named_and_taken_to_be_the_heaviest():
  found = simulated(loop('%p.3 = pred[] custom-call(%x), custom_call_target="f"\n  ' + BY_PREDICATE[len(COPIES) :]))
  assert found.unknown == {"y"}
  assert found.step.seconds == pytest.approx(8 * 11 * MICRO)


def test_parts_add_up_to_the_step():
  step = simulated(loop(BY_INDEX)).step
  assert sum(step.parts.values()) == pytest.approx(step.seconds)


def test_a_sparsecores_transfer_begins_when_it_gets_its_operand():
  sparse = f"""
%gather (p.9: f32[1024]) -> f32[2048] {{
  %p.9 = f32[1024]{{0}} parameter(0)
  ROOT %g.9 = f32[2048]{{0}} all-gather(%p.9), {GATHER}
}}
"""
  lines = (
      W,
      "%s = ((), f32[2048]{0}, u32[]) call-start(), to_apply=%gather",
      work("x", "a", 50_000),
      "%u = ((f32[1024]{0}), f32[2048]{0}, u32[]) call-update(%s, %w), to_apply=%gather",
      "%g = f32[2048]{0} call-done(%u), to_apply=%gather",
      "ROOT " + work("y", "x", 2000),
  )
  step = simulated(entry(*lines).replace("\nENTRY", f"{sparse}\nENTRY")).step
  assert step.seconds == pytest.approx(52 * MICRO + gather_seconds(WHOLE))
  assert costs.SPARSECORE in step.busy


@pytest.mark.parametrize("space, lane", [("S(1)", costs.DMA), ("S(5)", costs.TO_HOST)])
def test_copies_between_memories_run_beside_compute(space, lane):
  lines = (
      W,
      f"%s = (f32[1024]{{0:{space}}}, f32[1024]{{0}}, u32[]) copy-start(%w)",
      work("x", "a", 3000),
      f"%c = f32[1024]{{0:{space}}} copy-done(%s)",
      "ROOT " + work("y", "x", 2000),
  )
  step = simulated(entry(*lines)).step
  assert step.busy[lane] > 0
  assert step.seconds == pytest.approx(5 * MICRO)


def test_a_slice_that_is_copied_moves_its_own_bytes():
  lines = (
      W,
      "%s = ((f32[1024]{0}), f32[8]{0:S(1)}, u32[]) slice-start(%w), slice={[0:8]}",
      "%c = f32[8]{0} slice-done(%s)",
      "ROOT " + work("y", "c", 2000),
  )
  step = simulated(entry(*lines)).step
  assert step.busy[costs.DMA] == pytest.approx(32 / 1e12)


def test_what_is_computed_again_is_named_by_jax():
  again = work("x", "a", 3000) + ', metadata={op_name="jit(f)/transpose(jvp())/checkpoint/rematted_computation/dot"}'
  backward = work("z", "x", 2000) + ', metadata={op_name="jit(f)/transpose(jvp())/checkpoint/dot"}'
  step = simulated(entry(W, again, "ROOT " + backward)).step
  seconds = {(part.backward, part.again): value for part, value in step.parts.items()}
  assert seconds == {(True, True): pytest.approx(3 * MICRO), (True, False): pytest.approx(2 * MICRO)}


PERMUTE = (
    "%sent = (f32[8]{0}, f32[8]{0}) collective-permute-start(%x), source_target_pairs={{0,2},{2,0},{1,3},{3,1}}\n  "
    "%y = f32[8]{0} collective-permute-done(%sent)"
)


def test_a_loop_in_which_stages_send_to_each_other_is_the_pipelines():
  in_pipeline = lambda text: {part.in_pipeline for part in simulated(text).step.parts}
  assert in_pipeline(loop(PERMUTE)) == {True}
  assert in_pipeline(loop(PERMUTE.replace("{0,2},{2,0},{1,3},{3,1}", "{0,1},{1,0},{2,3},{3,2}"))) == {False}


def test_a_fusion_that_hides_a_collective_is_named():
  hiding = f"""
%both (p.9: f32[1024]) -> f32[2048] {{
  %p.9 = f32[1024]{{0}} parameter(0)
  ROOT %g.9 = f32[2048]{{0}} all-gather(%p.9), {GATHER}
}}
"""
  lines = (W, f"%f = f32[2048]{{0}} fusion(%w), kind=kCustom, calls=%both, {cycles(1000)}", "ROOT " + work("y", "a", 1))
  assert simulated(entry(*lines).replace("\nENTRY", f"{hiding}\nENTRY")).unknown == {"f"}

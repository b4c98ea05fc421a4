# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Compares the closed forms with counting, iteration by iteration."""

import dataclasses

import pytest

from maxtext_pp_ext.plan import costs
from maxtext_pp_ext.schedule import CircularSchedule, double_buffer, GatherPolicy

SCHEDULES = [
    CircularSchedule(stages=stages, microbatches=delay * stages * more, repeats=repeats, delay=delay)
    for stages in (1, 2, 3, 4, 8)
    for more in (1, 3)
    for repeats in (1, 2, 5)
    for delay in (1, 2)
]
NAMES = [f"S{s.stages}-M{s.microbatches}-R{s.repeats}-D{s.delay}" for s in SCHEDULES]
SIZES = costs.Sizes(
    parameters=1000,
    gradients=500,
    gradients_at_once=900,
    optimizer=2000,
    gathered=64,
    summed=128,
    sent_to_gather=48,
    sent_to_reduce=96,
    activations=16,
    kept=16,
    work=5,
    logits=700,
    head=30,
    beside_logits=40,
    head_sent=11,
)


def iterations_with(schedule, steps, attribute):
  """The number of iterations in which some stage has something there: all stages run the same program."""
  every = [steps(schedule, stage) for stage in range(schedule.stages)]
  return sum(any(getattr(step, attribute) is not None for step in at_once) for at_once in zip(*every, strict=True))


@pytest.mark.parametrize("schedule", SCHEDULES, ids=NAMES)
def test_gathers_and_reductions_of_the_window_are_those_of_its_steps(schedule):
  pieces = schedule.microbatches
  forward = 1 + iterations_with(schedule, double_buffer.forward, "arriving") / pieces
  backward = iterations_with(schedule, double_buffer.backward, "arriving") / pieces
  assert costs.gathers(schedule, GatherPolicy.REPEAT) == pytest.approx(forward + backward)
  reduced = 1 + iterations_with(schedule, double_buffer.backward, "reducing") / pieces
  assert costs.reductions(schedule, GatherPolicy.REPEAT) == pytest.approx(reduced)
  assert costs.reductions(schedule, GatherPolicy.ONCE) == costs.reductions(schedule, GatherPolicy.REPEAT)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=NAMES)
def test_a_stage_sends_as_often_as_there_are_iterations_and_never_to_itself(schedule):
  found = costs.pipelined(schedule, GatherPolicy.ITERATION, SIZES)
  assert costs.gathers(schedule, GatherPolicy.ITERATION) == 2 * schedule.iterations
  assert found.traffic["weights"] == 2 * schedule.iterations * SIZES.sent_to_gather
  assert found.traffic["gradients"] == schedule.iterations * SIZES.sent_to_reduce
  if schedule.stages == 1:
    assert found.traffic["activations"] == 0
  else:
    # All stages gather the microbatches, and stage 0 scatters them: (S − 1)/S of M each, in both directions.
    ends = found.traffic["activations"] - 2 * schedule.iterations * SIZES.activations
    assert ends == 4 * schedule.microbatches * (schedule.stages - 1) // schedule.stages * SIZES.activations


def test_once_gathers_least_and_holds_most():
  schedule = CircularSchedule(stages=4, microbatches=8, repeats=5)
  by_gather_policy = {gather_policy: costs.pipelined(schedule, gather_policy, SIZES) for gather_policy in GatherPolicy}
  sent = {gather_policy: found.traffic["weights"] for gather_policy, found in by_gather_policy.items()}
  assert sent[GatherPolicy.ONCE] < sent[GatherPolicy.REPEAT] < sent[GatherPolicy.ITERATION]
  held = lambda found: sum(found.phases[costs.Phase.BACKWARD].values())
  assert held(by_gather_policy[GatherPolicy.ONCE]) - held(by_gather_policy[GatherPolicy.REPEAT]) == 3 * SIZES.gathered


def test_the_peak_is_of_the_worst_time_of_a_step():
  schedule = CircularSchedule(stages=2, microbatches=2, repeats=2)
  for logits, when in ((0, costs.Phase.BACKWARD), (10**6, costs.Phase.LOGITS)):
    found = costs.pipelined(schedule, GatherPolicy.REPEAT, dataclasses.replace(SIZES, logits=logits))
    assert found.worst_phase == when and found.peak == sum(found.memory.values())
    assert found.peak == max(sum(({**found.always, **phase}).values()) for phase in found.phases.values())


def test_activations_go_between_slices_if_stages_do_and_weights_if_they_are_sharded_over_them():
  schedule = CircularSchedule(stages=4, microbatches=8, repeats=5, over_slices=True)
  found = costs.pipelined(schedule, GatherPolicy.REPEAT, SIZES)
  assert found.between_slices == found.traffic["activations"]
  # Compute hides cotangents, and with D = 2 what forward sends, but not what comes into the ring and leaves it.
  hidden = found.transfers["activations"].beside_compute * found.traffic["activations"]
  assert hidden == pytest.approx(schedule.iterations * SIZES.activations)
  delayed = costs.pipelined(dataclasses.replace(schedule, delay=2), GatherPolicy.REPEAT, SIZES)
  hidden = delayed.transfers["activations"].beside_compute * delayed.traffic["activations"]
  assert hidden == pytest.approx(2 * (schedule.iterations + 3) * SIZES.activations)
  sharded = dataclasses.replace(SIZES, between_slices=(10, 20, 3))
  within = dataclasses.replace(schedule, over_slices=False)
  found = costs.pipelined(within, GatherPolicy.ONCE, sharded)
  assert found.between_slices == round(5 * 10 + (5 + 3 / 8) * 20) + 3
  assert costs.without(7, sharded).between_slices == 7 * (3 * 10 + 20) + 3


def test_a_loop_of_maxtexts_that_offloads_may_copy_what_else_it_keeps():
  kept = dataclasses.replace(SIZES, kept=50)
  offloads = dataclasses.replace(kept, offloaded=7, on_the_way=14)
  assert costs.without(5, offloads).peak - costs.without(5, kept).peak == 5 * (50 - 16) + 14
  inputs = dataclasses.replace(SIZES, offloaded=7)
  assert costs.without(5, inputs).memory.get(costs.Part.KEPT_AGAIN, 0) == 0
  assert costs.Part.KEPT_AGAIN not in costs.pipelined(SCHEDULES[0], GatherPolicy.REPEAT, offloads).memory


def test_gradients_that_are_reduced_within_products_are_never_whole():
  within = dataclasses.replace(SIZES, gathered_within_products=32)
  unreduced = lambda sizes: costs.without(5, sizes).phases[costs.Phase.BACKWARD][costs.Part.UNREDUCED]
  assert unreduced(SIZES) - unreduced(within) == 32


def test_gradients_that_are_reduced_at_once_are_kept_in_the_dtype_of_sums():
  schedule = CircularSchedule(stages=1, microbatches=2, repeats=5)
  kept = {each: costs.pipelined(schedule, each, SIZES).phases[costs.Phase.BACKWARD] for each in GatherPolicy}
  found = {each: parts[costs.Part.GRADIENTS] for each, parts in kept.items()}
  assert found == {GatherPolicy.ITERATION: 900, GatherPolicy.REPEAT: 500, GatherPolicy.ONCE: 500}


def test_xla_sends_gradients_twice_that_are_scattered_over_all_devices_and_the_engine_once():
  schedule = CircularSchedule(stages=1, microbatches=1, repeats=4)
  sent = lambda costs_of: [
      costs_of(dataclasses.replace(SIZES, all_reduced=share, all_reduced_of_kernels=share)).traffic["gradients"]
      for share in (0.0, 1.0)
  ]
  for by_xla in (
      lambda sizes: costs.without(4, sizes),
      lambda sizes: costs.pipelined(schedule, GatherPolicy.ITERATION, sizes),
  ):
    once, twice = sent(by_xla)
    assert 0 < twice == 2 * once
  once, still_once = sent(lambda sizes: costs.pipelined(schedule, GatherPolicy.REPEAT, sizes))
  assert once == still_once

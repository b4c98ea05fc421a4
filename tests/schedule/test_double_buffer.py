# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The double buffer's contents: each repeat's weights are whole when they are needed, and released when they are not."""

from hypothesis import given
from hypothesis import strategies as st
import pytest

from maxtext_pp_ext.schedule import CircularSchedule, double_buffer


@st.composite
def schedules(draw):
  stages, delay = draw(st.integers(1, 5)), draw(st.sampled_from([1, 2]))
  microbatches = stages * draw(st.integers(delay, delay + 2))
  return CircularSchedule(stages=stages, microbatches=microbatches, repeats=draw(st.integers(1, 4)), delay=delay)


DIRECTIONS = {"forward": double_buffer.forward, "backward": double_buffer.backward}


@pytest.mark.parametrize("steps_of", DIRECTIONS.values(), ids=DIRECTIONS.keys())
@given(schedules())
def test_a_stage_works_with_the_slot_and_what_comes_into_it_has_arrived_whole(steps_of, schedule):
  for stage in range(schedule.stages):
    steps = steps_of(schedule, stage)
    current, buffer = steps[0].current, {}
    for step in steps:
      assert step.current == current
      assert step.repeat in (None, current)
      if step.arriving is not None:
        buffer.setdefault(step.arriving, []).append(step.chunk)
      if step.advances:
        [(current, chunks)] = buffer.items()  # one repeat and no other is in the buffer
        assert sorted(chunks) == list(range(schedule.microbatches))
        buffer = {}
    assert not buffer
    work = [(step.repeat, step.microbatch) for step in steps if step.repeat is not None]
    assert sorted(work) == [(r, m) for r in range(schedule.repeats) for m in range(schedule.microbatches)]
    assert [step.iteration for step in steps if step.repeat is None] == [
        step.iteration for step in steps if schedule.is_bubble(step.iteration, stage)
    ]


def iterations_with(phases, attribute):
  return {t for phase in phases if getattr(phase, attribute) for t in range(phase.first, phase.first + phase.count)}


@given(schedules())
def test_phases_have_the_iterations_in_which_some_stage_gathers_or_reduces_and_no_other(schedule):
  with_some = lambda steps_of, attribute: {
      step.iteration
      for stage in range(schedule.stages)
      for step in steps_of(schedule, stage)
      if getattr(step, attribute) is not None
  }
  forward = schedule.forward_phases(advances=True)
  backward = schedule.backward_phases(advances=True, reduces=True)
  assert iterations_with(forward, "advances") == with_some(double_buffer.forward, "arriving")
  assert iterations_with(backward, "advances") == with_some(double_buffer.backward, "arriving")
  assert iterations_with(backward, "reduces") == with_some(double_buffer.backward, "reducing")
  assert not iterations_with(forward, "reduces")


@given(schedules())
def test_each_gradient_but_the_last_is_reduced_once_after_its_repeat_is_done(schedule):
  for stage in range(schedule.stages):
    steps = double_buffer.backward(schedule, stage)
    for repeat in range(1, schedule.repeats):
      chunks = [step.chunk for step in steps if step.reducing == repeat]
      assert chunks == list(range(schedule.microbatches))
      last_use = max(i for i, step in enumerate(steps) if step.repeat == repeat)
      assert all(i > last_use for i, step in enumerate(steps) if step.reducing == repeat)
    assert not [step for step in steps if step.reducing == 0]  # reduced after the last iteration

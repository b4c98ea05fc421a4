# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The schedule's arithmetic, without devices: closed forms against counting."""

import collections
import itertools

from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import pytest

from maxtext_pp_ext.schedule import CircularSchedule


@st.composite
def schedules(draw):
  stages, delay = draw(st.integers(1, 9)), draw(st.integers(1, 2))
  microbatches = stages * draw(st.integers(delay, 4))
  return CircularSchedule(stages=stages, microbatches=microbatches, repeats=draw(st.integers(1, 5)), delay=delay)


def work(schedule):
  """(iteration, stage, microbatch, repeat) of everything that is not a bubble."""
  return [
      (t, s, schedule.microbatch(t, s), schedule.repeat(t, s))
      for t in range(schedule.iterations)
      for s in range(schedule.stages)
      if not schedule.is_bubble(t, s)
  ]


@given(schedules())
def test_every_stage_does_every_microbatch_of_every_repeat_once(schedule):
  counts = collections.Counter((s, m, r) for _, s, m, r in work(schedule))
  everything = schedule.stages * schedule.microbatches * schedule.repeats
  assert len(counts) == everything and set(counts.values()) == {1}


@given(schedules())
def test_a_stage_starts_after_its_input_is_there(schedule):
  done = {(s, m, r): t for t, s, m, r in work(schedule)}
  for (s, m, r), t in done.items():
    if s > 0:
      assert t == done[s - 1, m, r] + schedule.delay
    elif r > 0:
      assert t >= done[schedule.stages - 1, m, r - 1] + schedule.delay


@given(schedules())
def test_the_iteration_of_a_stage_repeat_and_microbatch_is_the_one_in_which_it_works_on_them(schedule):
  for t, s, m, r in work(schedule):
    assert schedule.iteration(r, m, s) == t


def iterations_of(phase):
  return range(phase.first, phase.first + phase.count)


@given(schedules(), st.booleans(), st.booleans())
def test_the_phases_of_a_direction_are_all_its_iterations_in_order(schedule, advances, reduces):
  forward = schedule.forward_phases(advances=advances)
  backward = schedule.backward_phases(advances=advances, reduces=reduces)
  assert [t for phase in forward for t in iterations_of(phase)] == list(range(schedule.iterations))
  assert [t for phase in backward for t in reversed(iterations_of(phase))] == list(reversed(range(schedule.iterations)))
  assert min(phase.count for phase in [*forward, *backward]) > 0
  if not advances:
    assert not any(phase.advances for phase in [*forward, *backward])
  if not reduces:
    assert not any(phase.reduces for phase in [*forward, *backward])


@given(schedules())
def test_bubbles_counted_equal_the_closed_form(schedule):
  slots = schedule.iterations * schedule.stages
  bubbles = slots - len(work(schedule))
  assert bubbles == schedule.bubble_iterations * schedule.stages
  assert schedule.bubble_fraction == pytest.approx(bubbles / slots)


@given(schedules())
def test_a_stage_begins_and_ends_each_repeat_once_and_in_order(schedule):
  for s in range(schedule.stages):
    items = [(schedule.item(t, s), r) for t, stage, _, r in work(schedule) if stage == s]
    assert [n for n, _ in items] == sorted(n for n, _ in items)
    repeats = list(range(schedule.repeats))
    assert [r for n, r in items if schedule.begins_repeat(n)] == repeats
    assert [r for n, r in items if schedule.ends_repeat(n)] == repeats
    for (n, r), (_, following) in itertools.pairwise(items):
      assert (following != r) == schedule.ends_repeat(n)


@given(schedules())
def test_all_stages_are_at_the_last_repeat_in_the_last_iterations_only(schedule):
  """These iterations need no weights of another repeat. The same holds for the first repeat and the first iterations."""
  first_of_last = max(t for t, _, m, r in work(schedule) if m == 0 and r == schedule.repeats - 1)
  last_of_first = min(t for t, _, m, r in work(schedule) if m == schedule.microbatches - 1 and r == 0)
  assert first_of_last == schedule.iterations - schedule.microbatches
  assert last_of_first == schedule.microbatches - 1


@given(schedules())
def test_stages_are_at_two_successive_repeats_at_most(schedule):
  used = collections.defaultdict(set)
  for t, _, _, r in work(schedule):
    used[t].add(r)
  for repeats in used.values():
    assert max(repeats) - min(repeats) <= 1


@given(schedules())
def test_bubbles_are_in_the_warm_up_and_after_the_last_input_only(schedule):
  for t in range(schedule.bubble_iterations, schedule.items):
    assert not any(schedule.is_bubble(t, s) for s in range(schedule.stages))


@given(schedules())
def test_arrivals_are_the_last_stages_results_in_time_for_the_first_stage(schedule):
  finished = {schedule.item(t, s): t for t, s, _, _ in work(schedule) if s == schedule.stages - 1}
  for item, t in finished.items():
    arrives = t + schedule.delay - 1
    assert schedule.arrival(arrives) == item
    assert arrives < item + schedule.microbatches  # before stage 0 reads the microbatch's slot again


@given(schedules())
def test_arrays_and_integers_give_the_same(schedule):
  t, s = np.ogrid[: schedule.iterations, : schedule.stages]
  for name in ("item", "is_bubble", "microbatch", "repeat"):
    array = getattr(schedule, name)(t, s)
    assert array.tolist() == [
        [getattr(schedule, name)(t, s) for s in range(schedule.stages)] for t in range(schedule.iterations)
    ]


@pytest.mark.parametrize(
    "values, message",
    [
        ({"stages": 0, "microbatches": 4, "repeats": 1}, "stages must be a positive integer, got 0"),
        ({"stages": 2, "microbatches": 4.0, "repeats": 1}, "microbatches must be a positive integer"),
        ({"stages": 2, "microbatches": 4, "repeats": True}, "repeats must be a positive integer"),
        ({"stages": 3, "microbatches": 4, "repeats": 1}, r"multiple of stages \(3\); the nearest are 3 and 6"),
        ({"stages": 4, "microbatches": 3, "repeats": 1}, r"multiple of stages \(4\); the nearest is 4\."),
        ({"stages": 4, "microbatches": 5, "repeats": 1, "delay": 2}, "the nearest is 8"),
        ({"stages": 4, "microbatches": 4, "repeats": 1, "delay": 2}, "2 × 4 = 8"),
        ({"stages": 4, "microbatches": 16, "repeats": 1, "delay": 3}, "delay must be 1 or 2"),
    ],
)
def test_a_schedule_that_cannot_be_says_what_to_set(values, message):
  with pytest.raises(ValueError, match=message):
    CircularSchedule(**values)

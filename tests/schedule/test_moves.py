# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Moves into the ring of stages and out of it; `tests/engine/test_ring.py` follows microbatches through it."""

import functools

import numpy as np
import pytest

from maxtext_pp_ext.schedule import CircularSchedule
from maxtext_pp_ext.schedule.moves import entries, exits, exits_back, Move, numbers, rounds, transfers

_schedule = functools.partial(CircularSchedule, over_slices=True)


@pytest.mark.parametrize("stages, slots", [(2, 1), (3, 4), (8, 2)])
def test_a_stage_sends_and_gets_one_array_in_each_round(stages, slots):
  places = [(stage, slot) for stage in range(stages) for slot in range(slots)]
  moves = [
      Move(place, target) for place, target in zip(places, np.random.default_rng(0).permutation(places), strict=True)
  ]
  moves = [Move(move.source, tuple(map(int, move.target))) for move in moves]
  found = rounds(moves)
  assert sorted(move for each in found for move in each) == sorted(moves)
  for each in found:
    assert len({move.source[0] for move in each}) == len({move.target[0] for move in each}) == len(each)


@pytest.mark.parametrize("delay", [1, 2])
@pytest.mark.parametrize("stages, repeats", [(2, 1), (4, 3), (8, 2)])
def test_where_as_many_microbatches_as_wait_fill_the_ring_each_stage_sends_one_at_a_time(stages, repeats, delay):
  schedule = _schedule(stages=stages, microbatches=delay * stages, repeats=repeats, delay=delay)
  stored, in_transfer = entries(schedule)
  assert len(stored) == stages and len(in_transfer) == (delay - 1) * stages
  assert len(rounds(exits(schedule))) == delay
  for moves in (stored, in_transfer):
    assert len({move.target[0] for move in moves}) == len(moves)


@pytest.mark.parametrize("microbatches, delay, count", [(4, 1, 1), (8, 1, 6), (8, 2, 1), (12, 2, 8)])
def test_transfers_are_those_of_the_microbatches_that_no_idle_stage_passes_on(microbatches, delay, count):
  """(4, 1): one array of each stage out; (8, 1): one of each other stage in, and three of stage 0 out."""
  assert transfers(_schedule(stages=4, microbatches=microbatches, repeats=2, delay=delay)) == count


def test_within_a_slice_microbatches_are_gathered_and_scattered_in_their_order():
  schedule = CircularSchedule(stages=4, microbatches=8, repeats=2)
  assert numbers(schedule) == list(range(8)) and transfers(schedule) == 2 * 2 * 3


@pytest.mark.parametrize("delay", [1, 2])
@pytest.mark.parametrize("stages, times", [(1, 1), (1, 3), (2, 1), (3, 1), (4, 1), (4, 2), (4, 3), (8, 5)])
def test_microbatches_begin_where_they_are_and_each_is_worked_on(stages, times, delay):
  schedule = _schedule(stages=stages, microbatches=times * delay * stages, repeats=2, delay=delay)
  found, outside = numbers(schedule), [divmod(m, times * delay) for m in range(schedule.microbatches)]
  assert sorted(found) == list(range(schedule.microbatches)) and (stages > 1 or found == sorted(found))
  stored, in_transfer = entries(schedule)
  assert all(move.is_within for move in (*stored[:stages], *in_transfer))
  back, back_in_transfer = exits_back(schedule)
  assert sorted(move.target for move in back_in_transfer) == [(stage, 0) for stage in range(stages)]
  out = [move.reversed for move in exits(schedule)]
  for moves in ([*stored, *in_transfer], out, [*back, *back_in_transfer]):
    assert sorted((move.source[0], move.source[1] + k) for move in moves for k in range(move.size)) == outside
  for moves in (stored, out, back):
    targets = [(move.target[0], move.target[1] + k) for move in moves for k in range(move.size)]
    assert len(set(targets)) == len(targets)
  if times > 1:  # the last D·S end where they are
    assert all(move.is_within for move in out[: delay * stages])


def test_a_schedule_whose_stages_are_idle_at_other_times_is_refused():
  class Late(CircularSchedule):

    def iteration(self, repeat, microbatch, s):
      return super().iteration(repeat, microbatch, s) + 1

  for over_slices in (True, False):
    with pytest.raises(NotImplementedError, match=r"stages begin at iterations \[1, 2\]"):
      numbers(Late(stages=2, microbatches=2, repeats=2, over_slices=over_slices))

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Where microbatches begin and end in the ring of stages, and how they move from and to where they are outside of it.

Outside of the pipeline each stage has M/S successive microbatches. In the ring each stage has slots 0 … M − 1.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from maxtext_pp_ext.schedule.circular import Schedule


class Move(NamedTuple):
  """Arrays move from successive slots of a stage to successive slots of another one, or of the same."""

  source: tuple[int, int]  # (stage, first slot)
  target: tuple[int, int]
  size: int = 1  # how many arrays

  @property
  def reversed(self) -> "Move":
    return Move(self.target, self.source, self.size)

  @property
  def is_within(self) -> bool:
    """Whether it stays at its stage."""
    return self.source[0] == self.target[0]


def rounds(moves: Sequence[Move]) -> list[list[Move]]:
  """The moves in rounds, in each of which each stage sends once at most and gets once at most, all of them as much.

  What stays at its stage has rounds of its own.
  """
  result: list[list[Move]] = []
  for move in moves:
    free = next((each for each in result if not any(_clash(move, other) for other in each)), None)
    if free is None:
      result.append(free := [])
    free.append(move)
  return result


def _clash(one: Move, other: Move) -> bool:
  alike = one.is_within == other.is_within and one.size == other.size
  return not alike or one.source[0] == other.source[0] or one.target[0] == other.target[0]


def transfers(schedule: Schedule) -> int:
  """How many arrays a stage sends to bring all inputs into the ring and all outputs out of it, one after the other."""
  moves = (*entries(schedule), exits(schedule))
  return sum(each[0].size for of_some in moves for each in rounds(of_some) if not each[0].is_within)


def entries(schedule: Schedule) -> tuple[list[Move], list[Move]]:
  """(how each input moves to where it begins, how some move to where they are in transfer before the first iteration).

  The first D·S begin at the stages from which idle stages pass them on to stage 0 in time, the others at stage 0.

  Raises:
    NotImplementedError: if stages are idle at other times than those of `CircularSchedule`.
  """
  _check(schedule)
  stored, in_transfer = [], []
  for m in range(_riders(schedule)):
    source = divmod(m, share(schedule))
    before, late = divmod(m, schedule.delay)  # how many stages before stage 0, and whether it arrives an iteration later
    if late:  # it comes to its stage in the first iteration
      in_transfer.append(Move(source, ((-before - 1) % schedule.stages, 0)))
    else:
      stored.append(Move(source, (-before % schedule.stages, 0)))
  others = _at_their_stages(schedule, _riders(schedule), schedule.microbatches)
  return [*stored, *(Move(source, (0, m), count) for m, source, count in others)], in_transfer


def exits(schedule: Schedule) -> list[Move]:
  """How each output moves from where the last iteration leaves it; raises as `entries`.

  The last D·S have been passed on by stages that are done, as far as there were iterations. The others are at stage 0.
  """
  _check(schedule)
  moves = []
  for behind in range(_riders(schedule)):
    m = schedule.microbatches - 1 - behind
    passed, late = divmod(behind, schedule.delay)
    at = passed, schedule.microbatches - 1 - late
    moves.append(Move(at, divmod(m, share(schedule))))
  others = _at_their_stages(schedule, 0, schedule.microbatches - _riders(schedule))
  return [*moves, *(Move((0, m), target, count) for m, target, count in others)]


def share(schedule: Schedule) -> int:
  """How many microbatches each stage has outside of the pipeline."""
  return schedule.microbatches // schedule.stages


def _riders(schedule: Schedule) -> int:
  return schedule.delay * schedule.stages


def _at_their_stages(schedule: Schedule, first: int, end: int) -> Iterator[tuple[int, tuple[int, int], int]]:
  """Of microbatches `first` … `end` − 1 those of each stage: (the first of them, (stage, its slot outside), how many)."""
  of_each = share(schedule)
  for stage in range(schedule.stages):
    low, high = max(first, stage * of_each), min(end, (stage + 1) * of_each)
    if low < high:
      yield low, (stage, low - stage * of_each), high - low


def _check(schedule: Schedule) -> None:
  stages, delay = schedule.stages, schedule.delay
  begin = [schedule.iteration(0, 0, s) for s in range(stages)]
  idle = schedule.iterations - schedule.microbatches * schedule.repeats
  if begin != [delay * s for s in range(stages)] or idle != delay * (stages - 1) or schedule.arrival(delay * stages) != 1:
    raise NotImplementedError(
        f"{type(schedule).__name__}: stages begin at iterations {begin} and are idle in {idle}. Idle stages pass inputs"
        f" on to stage 0, and outputs from it: stage s has to begin at D·s, and to be idle in D·(S − 1), D = {delay}."
    )

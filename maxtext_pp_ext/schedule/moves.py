# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Over slices: where microbatches begin and end in the ring of stages, and how they move to it and from it.

Outside of the pipeline each stage has M/S successive microbatches. In the ring each stage has slots 0 … M − 1. Stages
work on microbatches in an order in which as many as possible begin, or end, where they are outside (`numbers`).
"""

from collections.abc import Sequence
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
  if not schedule.over_slices:  # all stages gather them, and stage 0 scatters them
    return 2 * share(schedule) * (schedule.stages - 1)
  moves = (*entries(schedule), exits(schedule))
  return sum(each[0].size for of_some in moves for each in rounds(of_some) if not each[0].is_within)


def numbers(schedule: Schedule) -> list[int]:
  """Returns the number outside of the pipeline of the m-th microbatch that stages work on, for m = 0 … M − 1.

  Within a slice it is m.

  Raises:
    NotImplementedError: if stages are idle at other times than those of `CircularSchedule`.
  """
  _check(schedule)
  if not schedule.over_slices:
    return list(range(schedule.microbatches))
  of_each, last = share(schedule), schedule.microbatches - 1
  left = [list(range(stage * of_each, (stage + 1) * of_each)) for stage in range(schedule.stages)]
  chosen: dict[int, int] = {}
  begin = {m: _begins(schedule, m)[0] for m in range(_riders(schedule))}
  end = {last - behind: behind // schedule.delay for behind in range(_riders(schedule))}
  for m, stage in begin.items():
    chosen[m] = left[stage].pop(0)
  for m, stage in end.items():
    if m not in chosen and left[stage]:
      chosen[m] = left[stage].pop()
  others = iter([number for of_stage in left for number in of_stage])
  return [chosen[m] if m in chosen else next(others) for m in range(schedule.microbatches)]


def entries(schedule: Schedule) -> tuple[list[Move], list[Move]]:
  """(how each input moves to where it begins, how some move to where they are in transfer before the first iteration).

  The first D·S begin at the stages from which idle stages pass them on to stage 0 in time, the others at stage 0. Raises
  as `numbers`.
  """
  sources = [divmod(number, share(schedule)) for number in numbers(schedule)]
  stored: list[Move] = []
  in_transfer: list[Move] = []
  for m in range(_riders(schedule)):
    stage, arrives_first = _begins(schedule, m)
    (in_transfer if arrives_first else stored).append(Move(sources[m], (stage, 0)))
  others = [Move(source, (0, m)) for m, source in enumerate(sources) if m >= _riders(schedule)]
  return [*stored, *_merged(others)], in_transfer


def exits(schedule: Schedule) -> list[Move]:
  """How each output moves from where the last iteration leaves it; raises as `numbers`.

  The last D·S have been passed on by stages that are done, as far as there were iterations. The others are at stage 0.
  """
  targets = [divmod(number, share(schedule)) for number in numbers(schedule)]
  last, riders = schedule.microbatches - 1, _riders(schedule)
  passed = [divmod(behind, schedule.delay) for behind in range(riders)]
  moves = [Move((stage, last - late), targets[last - behind]) for behind, (stage, late) in enumerate(passed)]
  return [*moves, *_merged([Move((0, m), target) for m, target in enumerate(targets[: last + 1 - riders])])]


def exits_back(schedule: Schedule) -> tuple[list[Move], list[Move]]:
  """The transpose of `exits` and of the rotation before, with D = 1: (moves into the store, moves into transfer).

  With M = S both are one transfer.
  """
  moves = [move.reversed for move in exits(schedule)]
  left_last = lambda move: move.target[1] == schedule.microbatches - 1
  in_transfer = [Move(move.source, ((move.target[0] - 1) % schedule.stages, 0)) for move in moves if left_last(move)]
  return [move for move in moves if not left_last(move)], in_transfer


def share(schedule: Schedule) -> int:
  """How many microbatches each stage has outside of the pipeline."""
  return schedule.microbatches // schedule.stages


def _riders(schedule: Schedule) -> int:
  return schedule.delay * schedule.stages


def _begins(schedule: Schedule, m: int) -> tuple[int, bool]:
  """(the stage at which the m-th of the first D·S begins, whether it arrives there in the first iteration)."""
  # How many stages before stage 0, and whether it comes to stage 0 an iteration later than those from there.
  before, late = divmod(m, schedule.delay)
  return (-before - late) % schedule.stages, late > 0


def _merged(moves: Sequence[Move]) -> list[Move]:
  """The moves, of which those of successive slots to successive slots are one."""
  result: list[Move] = []
  for move in moves:
    if result and move == _following(result[-1]):
      result[-1] = result[-1]._replace(size=result[-1].size + 1)
    else:
      result.append(move)
  return result


def _following(move: Move) -> Move:
  """The move from the next slot to the next slot."""
  (source, at), (target, to), size = move
  return Move((source, at + size), (target, to + size))


def _check(schedule: Schedule) -> None:
  stages, delay = schedule.stages, schedule.delay
  begin = [schedule.iteration(0, 0, s) for s in range(stages)]
  idle = schedule.iterations - schedule.microbatches * schedule.repeats
  if begin != [delay * s for s in range(stages)] or idle != delay * (stages - 1) or schedule.arrival(delay * stages) != 1:
    raise NotImplementedError(
        f"{type(schedule).__name__}: stages begin at iterations {begin} and are idle in {idle}. What moves between stages"
        f" relies on it that stage s begins at D·s and is idle in D·(S − 1), D = {delay}."
    )

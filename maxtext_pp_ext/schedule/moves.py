# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Where microbatches begin and end in the ring of stages, and how they move from and to where they are outside of it.

Outside of the pipeline each stage has M/S successive microbatches. In the ring each stage has slots 0 … M − 1.
"""

from collections.abc import Sequence
from typing import NamedTuple

from maxtext_pp_ext.schedule.circular import Schedule


class Move(NamedTuple):
  """An array moves from one (stage, slot) to another."""

  source: tuple[int, int]
  target: tuple[int, int]

  @property
  def reversed(self) -> "Move":
    return Move(self.target, self.source)

  @property
  def is_within(self) -> bool:
    """Whether it stays at its stage."""
    return self.source[0] == self.target[0]


def rounds(moves: Sequence[Move]) -> list[list[Move]]:
  """The moves in rounds. In one, each stage sends one array at most and gets one at most, or arrays stay at stages."""
  result: list[list[Move]] = []
  for move in moves:
    free = next((each for each in result if not any(_clash(move, other) for other in each)), None)
    if free is None:
      result.append(free := [])
    free.append(move)
  return result


def _clash(one: Move, other: Move) -> bool:
  return one.is_within != other.is_within or one.source[0] == other.source[0] or one.target[0] == other.target[0]


def transfers(schedule: Schedule) -> int:
  """How many arrays a stage sends to bring all inputs into the ring and all outputs out of it, one after the other."""
  moves = (*entries(schedule), exits(schedule))
  return sum(not each[0].is_within for of_some in moves for each in rounds(of_some))


def entries(schedule: Schedule) -> tuple[list[Move], list[Move]]:
  """(how each input moves to where it begins, how some move to where they are in transfer before the first iteration).

  The first D·S begin at the stages from which idle stages pass them on to stage 0 in time, the others at stage 0.
  """
  stored, in_transfer = [], []
  for m in range(schedule.microbatches):
    source = divmod(m, schedule.microbatches // schedule.stages)
    before, late = divmod(m, schedule.delay)  # how many stages before stage 0, and whether it arrives an iteration later
    if m >= schedule.delay * schedule.stages:
      stored.append(Move(source, (0, m)))
    elif late:  # it comes to its stage in the first iteration
      in_transfer.append(Move(source, ((-before - 1) % schedule.stages, 0)))
    else:
      stored.append(Move(source, (-before % schedule.stages, 0)))
  return stored, in_transfer


def exits(schedule: Schedule) -> list[Move]:
  """How each output moves from where the last iteration leaves it.

  The last D·S have been passed on by stages that are done, as far as there were iterations. The others are at stage 0.
  """
  moves = []
  for m in range(schedule.microbatches):
    behind = schedule.microbatches - 1 - m
    passed, late = divmod(behind, schedule.delay)
    at = (passed, schedule.microbatches - 1 - late) if behind < schedule.delay * schedule.stages else (0, m)
    moves.append(Move(at, divmod(m, schedule.microbatches // schedule.stages)))
  return moves

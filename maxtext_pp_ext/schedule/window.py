# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The contents of a stage's Buffer Sliding Window at each iteration, and the pieces that enter and leave it.

This is the arithmetic of `engine.engine`'s pseudo-code, for pictures and tests. The window has a slot for the repeat in
work, and a prefetch buffer in which the next repeat arrives, in as many pieces as a repeat has microbatches.
"""

from __future__ import annotations

import dataclasses

from maxtext_pp_ext.schedule.interface import Schedule


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
  """A stage at one iteration."""

  iteration: int  # t
  repeat: int | None  # the repeat in work; None in a bubble
  microbatch: int | None  # the microbatch in work; None in a bubble
  slot: int  # the repeat whose weights are in the slot
  # The repeat from which a piece is gathered into the prefetch buffer; None if no piece is gathered.
  arriving: int | None = None
  # The repeat from whose gradient a piece is reduced; None if no piece is reduced, as always in forward.
  reducing: int | None = None
  piece: int | None = None  # number of the piece, for both; None if there is no piece
  # Whether the prefetch buffer becomes the slot after this iteration, which frees the slot's weights.
  advances: bool = False


def forward(schedule: Schedule, stage: int) -> list[Step]:
  """A stage's iterations in forward, 0 … T − 1. Repeat 0 is gathered before the first."""
  return [_step(schedule, t, stage, backward=False) for t in range(schedule.iterations)]


def backward(schedule: Schedule, stage: int) -> list[Step]:
  """A stage's iterations in backward, T − 1 … 0. It begins with the last repeat, which forward left in the slot."""
  return [_step(schedule, t, stage, backward=True) for t in reversed(range(schedule.iterations))]


def _step(schedule: Schedule, t: int, stage: int, *, backward: bool) -> Step:
  last, item = schedule.repeats - 1, schedule.item(t, stage)
  slot = min(max(schedule.repeat(t, stage), 0), last)
  if schedule.is_bubble(t, stage):
    return Step(iteration=t, repeat=None, microbatch=None, slot=slot)
  following = slot - 1 if backward else slot + 1
  arriving = following if 0 <= following <= last else None
  reducing = slot + 1 if backward and slot < last else None
  piece = item % schedule.microbatches
  ends = schedule.begins_repeat(item) if backward else schedule.ends_repeat(item)
  return Step(
      iteration=t,
      repeat=slot,
      microbatch=schedule.microbatch(t, stage),
      slot=slot,
      arriving=arriving,
      reducing=reducing,
      piece=None if arriving is reducing is None else schedule.microbatches - 1 - piece if backward else piece,
      advances=arriving is not None and bool(ends),
  )

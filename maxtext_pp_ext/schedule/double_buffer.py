# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The contents of a stage's Buffer Sliding Window at each iteration, and the chunks that enter and leave it.

This is the arithmetic of `engine.engine`'s pseudo-code, for pictures and tests. It has a current buffer for the
repeat in work, and a next buffer in which the next repeat arrives, in as many chunks as a repeat has microbatches.
"""

import dataclasses

from maxtext_pp_ext.schedule.circular import Schedule


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
  """A stage at one iteration."""

  iteration: int  # t
  repeat: int | None  # the repeat in work; None in a bubble
  microbatch: int | None  # the microbatch in work; None in a bubble
  current: int  # the repeat whose weights are in the current buffer
  # The repeat from which a chunk is gathered into the next buffer; None if no chunk is gathered.
  arriving: int | None = None
  # The repeat from whose gradient a chunk is reduced; None if no chunk is reduced, as always in forward.
  reducing: int | None = None
  chunk: int | None = None  # number of the chunk, for both; None if there is no chunk
  # Whether the next buffer becomes the current buffer after this iteration, which frees the current weights.
  advances: bool = False


def forward(schedule: Schedule, stage: int) -> list[Step]:
  """A stage's iterations in forward, 0 … T − 1. Repeat 0 is gathered before the first."""
  return [_step(schedule, t, stage, backward=False) for t in range(schedule.iterations)]


def backward(schedule: Schedule, stage: int) -> list[Step]:
  """A stage's iterations in backward, T − 1 … 0. It begins with the last repeat, which forward left current."""
  return [_step(schedule, t, stage, backward=True) for t in reversed(range(schedule.iterations))]


def _step(schedule: Schedule, t: int, stage: int, *, backward: bool) -> Step:
  last, item = schedule.repeats - 1, schedule.item(t, stage)
  current = min(max(schedule.repeat(t, stage), 0), last)
  if schedule.is_bubble(t, stage):
    return Step(iteration=t, repeat=None, microbatch=None, current=current)
  following = current - 1 if backward else current + 1
  arriving = following if 0 <= following <= last else None
  reducing = current + 1 if backward and current < last else None
  chunk = item % schedule.microbatches
  ends = schedule.begins_repeat(item) if backward else schedule.ends_repeat(item)
  return Step(
      iteration=t,
      repeat=current,
      microbatch=schedule.microbatch(t, stage),
      current=current,
      arriving=arriving,
      reducing=reducing,
      chunk=None if arriving is reducing is None else schedule.microbatches - 1 - chunk if backward else chunk,
      advances=arriving is not None and bool(ends),
  )

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Draws a schedule in a terminal: a row per stage, a column per iteration, digits and colours for repeats."""

from collections.abc import Iterator
import string
import textwrap

from maxtext_pp_ext import units
from maxtext_pp_ext.schedule import double_buffer, GatherPolicy, Schedule

_DIGITS = string.digits + string.ascii_letters
_COLORS = (34, 32, 33, 35, 36, 31)


def lines(
    schedule: Schedule, *, stage: int, width: int, color: bool, gather_policy: GatherPolicy | None = GatherPolicy.REPEAT
) -> Iterator[str]:
  """The picture, in parts no wider than `width`: all stages in forward, and one stage's double buffer in both directions.

  A gather policy without a double buffer has a line that says so instead.
  """
  yield title(schedule)
  yield from textwrap.wrap(legend(schedule.repeats), width)
  yield "forward: the repeat that each stage works on; · in a bubble"
  rows = {
      f"stage {s}": [_cell(step.repeat, color) for step in double_buffer.forward(schedule, s)]
      for s in range(schedule.stages)
  }
  yield from _wrapped(rows, range(schedule.iterations), width)
  if (without := without_double_buffer(gather_policy)) is not None:
    yield ""
    yield from textwrap.wrap(without, width)
    return
  for name, steps in (
      ("forward", double_buffer.forward(schedule, stage)),
      ("backward", double_buffer.backward(schedule, stage)),
  ):
    yield ""
    reduced = "; reducing: repeat whose gradient is reduced" if name == "backward" else ""
    yield from textwrap.wrap(
        f"{name}, double buffer of stage {stage}; arriving: repeat whose chunks are gathered{reduced}; advances: ^ where "
        "the arrived weights become the current ones, and those before are released",
        width,
    )
    fields = {"works on": "repeat", "current": "current", "arriving": "arriving"}
    fields |= {"reducing": "reducing"} if name == "backward" else {}
    rows = {row: [_cell(getattr(step, field), color) for step in steps] for row, field in fields.items()}
    rows["advances"] = ["^" if step.advances else " " for step in steps]
    yield from _wrapped(rows, [step.iteration for step in steps], width)


def without_double_buffer(gather_policy: GatherPolicy | None) -> str | None:
  """Why there is no double buffer; None if there is one."""
  if gather_policy is None:
    return "no double buffer: this implementation does not say when it gathers weights"
  if gather_policy.prefetches:
    return None
  if gather_policy.gathers_first:
    return "no double buffer: the weights of all repeats are gathered before the first iteration, and kept"
  return "no double buffer: weights are gathered at every iteration, and released after it"


def legend(repeats: int) -> str:
  """What the signs of the repeats mean; "" if they are their numbers."""
  if repeats <= 10:
    return ""
  count, last = len(_DIGITS), min(repeats, len(_DIGITS)) - 1
  letters = f"a is repeat 10, {_DIGITS[last]} is {last}"
  return letters + (f"; repeat {count} is 0 again, and so on" if repeats > count else "")


def title(schedule: Schedule) -> str:
  """The schedule in words."""
  delay = f", forwarding delay {schedule.delay}" if schedule.delay > 1 else ""
  sizes = {"stage": schedule.stages, "microbatch": schedule.microbatches, "repeat": schedule.repeats}
  return (
      f"{' × '.join(units.counted(size, noun) for noun, size in sizes.items())}{delay}: "
      f"{units.counted(schedule.iterations, 'iteration')}, bubble {100 * schedule.bubble_fraction:.1f} %"
  )


def _cell(repeat: int | None, color: bool) -> str:
  if repeat is None:
    return "·"
  digit = _DIGITS[repeat % len(_DIGITS)]
  return f"\033[{_COLORS[repeat % len(_COLORS)]}m{digit}\033[0m" if color else digit


def _wrapped(rows: dict[str, list[str]], iterations, width: int) -> Iterator[str]:
  iterations = list(iterations)
  label = max(len("iteration"), *map(len, rows)) + 1
  part = max(10, (width - label) // 10 * 10)
  for first in range(0, len(iterations), part):
    numbers = "".join(f"{iteration:<10}" for iteration in iterations[first : first + part : 10])
    yield f"{'iteration':<{label}}{numbers.rstrip()}"
    for name, cells in rows.items():
      yield f"{name:<{label}}{''.join(cells[first : first + part])}".rstrip()

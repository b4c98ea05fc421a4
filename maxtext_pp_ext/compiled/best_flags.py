# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Searches the sets of XLA flags with which a step is projected to be fastest. No JAX."""

from collections.abc import Callable, Sequence
import dataclasses
import math
import re
from typing import Any

from maxtext_pp_ext.compiled import flags

MOST = 3  # sets in a combination
_GAIN = 1e-3  # share of the step that another set has to gain; tables show no less
# What libtpu says of a flag that it lacks, or lacks for this kind of chip.
_NO_FLAG = re.compile(r"No such compile option: '(\w+)'")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tried:
  """A step that was compiled with some sets of flags."""

  sets: tuple[str, ...]  # their names
  without: tuple[str, ...]  # flags of these sets that were left out, since the compiler lacks them
  xla_flags: str  # the value of `compile_xla_flags`
  figures: dict[str, Any]  # see `compare.figures`

  @property
  def seconds(self) -> float:
    """Projected seconds of the step; infinite if it was not compiled."""
    return self.figures.get("projection", {}).get("step_s", math.inf)

  def is_faster(self, other: "Tried") -> bool:
    """Whether the step gains more than the tables' last digit."""
    return self.seconds < (1 - _GAIN) * other.seconds


def search(compiled: Callable[[str], dict[str, Any]], own: str = "") -> tuple[Tried, list[Tried]]:
  """Tries no set, each set alone, and then the best with each other one that alone made the step faster.

  It goes on until no further set makes the step faster, or the combination has `MOST` sets. Sets whose flags contradict
  flags that are given are not tried. Flags that the compiler lacks are left out.

  Args:
    compiled: (a value of `compile_xla_flags`) -> the figures of the step, or `failure`.
    own: the run's own `compile_xla_flags`, which stay.

  Returns:
    (the best, all that was tried). The best has no sets if none makes the step faster.
  """
  best = default = Tried(sets=(), without=(), xla_flags=own, figures=compiled(own))
  tried, useful = [default], list(flags.SETS)
  while len(best.sets) < MOST:
    for name in useful:
      if (found := _with(compiled, own, best, name, tried)) is not None:
        tried.append(found)
    if best is default:
      useful = [each.sets[0] for each in tried if each.is_faster(default)]
    fastest = min(tried, key=lambda each: each.seconds)
    if not fastest.is_faster(best):
      break
    best = fastest
  return best, tried


def _with(
    compiled: Callable[[str], dict[str, Any]], own: str, best: Tried, name: str, tried: Sequence[Tried]
) -> Tried | None:
  """The step with the best sets and another one; None if that contradicts given flags, or adds none."""
  sets, lacked = (*best.sets, name), {flag for each in tried for flag in each.without}
  while True:
    without = tuple(sorted(flag for flag in lacked if any(f"--{flag}=" in flags.SETS[each] for each in sets)))
    try:
      xla_flags = flags.joined(own, sets, without)
    except ValueError:  # a flag would have two values
      return None
    if xla_flags == best.xla_flags:
      return None
    figures = compiled(xla_flags)
    missing = set(_NO_FLAG.findall(figures.get("failure", ""))) - lacked
    if not missing or not any(f"--{flag}=" in flags.SETS[each] for flag in missing for each in sets):
      return Tried(sets=sets, without=without, xla_flags=xla_flags, figures=figures)
    lacked |= missing

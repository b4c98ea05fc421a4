# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Searches the sets of XLA flags with which a step is projected to be fastest. No JAX."""

from collections.abc import Callable, Sequence
import math
import re
from typing import Any, NamedTuple

from maxtext_pp_ext.compiled import flags

BEST = "best"  # in place of names of sets: search them
MOST = 3  # sets in a combination
_GAIN = 1e-3  # share of the step that another set has to gain; tables show no less
# What libtpu says of a flag that it lacks, or lacks for this kind of chip.
_NO_FLAG = re.compile(r"No such compile option: '(\w+)'")


class Flags(NamedTuple):
  """A run's flags with some sets."""

  value: str  # of `compile_xla_flags`
  sets: tuple[str, ...] = ()  # the names of the sets
  without: tuple[str, ...] = ()  # flags of these sets that are left out, since the compiler lacks them


class Tried(NamedTuple):
  """A step that was compiled."""

  flags: Flags
  figures: dict[str, Any]  # see `compare.figures`

  @property
  def seconds(self) -> float:
    """Projected seconds of the step; infinite if it was not compiled."""
    return self.figures.get("projection", {}).get("step_s", math.inf)

  def is_faster(self, other: "Tried") -> bool:
    """Whether the step gains more than the tables' last digit."""
    return self.seconds < (1 - _GAIN) * other.seconds


def search(compiled: Callable[[Flags], dict[str, Any]], own: str = "") -> tuple[Tried, list[Tried]]:
  """Tries no set, each set alone, and then the best with each other one that alone made the step faster.

  It goes on until no further set makes the step faster, or the combination has `MOST` sets. Sets whose flags contradict
  flags that are given are not tried. Flags that the compiler lacks are left out.

  Args:
    compiled: returns the figures of the step with these flags, or `failure`.
    own: the run's own `compile_xla_flags`, which stay.

  Returns:
    (the best, all that was tried). The best has no sets if none makes the step faster. Of a step that is refused with any
    flags nothing else is tried.

  Raises:
    ValueError: `own` is not a list of flags.
  """
  flags.joined(own, ())
  best = default = Tried(Flags(own), compiled(Flags(own)))
  tried, useful = [default], [] if default.figures.get("refused") else list(flags.SETS)
  while len(best.flags.sets) < MOST:
    for name in useful:
      if (found := _with(compiled, own, best, name, tried)) is not None:
        tried.append(found)
    if best is default:
      useful = [each.flags.sets[0] for each in tried if each.is_faster(default)]
    fastest = min(tried, key=lambda each: each.seconds)
    if not fastest.is_faster(best):
      break
    best = fastest
  return best, tried


def lacks_a_flag(figures: dict[str, Any]) -> bool:
  """Whether a step was not compiled since the compiler lacks a flag."""
  return bool(_NO_FLAG.search(figures.get("failure", "")))


def _with(
    compiled: Callable[[Flags], dict[str, Any]], own: str, best: Tried, name: str, tried: Sequence[Tried]
) -> Tried | None:
  """The step with the best sets and another one; None if that contradicts given flags, or adds none."""
  sets, lacked = (*best.flags.sets, name), {flag for each in tried for flag in each.flags.without}
  while True:
    without = tuple(sorted(flag for flag in lacked if _is_in(flag, sets)))
    try:
      given = Flags(flags.joined(own, sets, without), sets, without)
    except ValueError:  # a flag would have two values
      return None
    if given.value == best.flags.value:
      return None
    figures = compiled(given)
    missing = set(_NO_FLAG.findall(figures.get("failure", ""))) - lacked
    if not any(_is_in(flag, sets) for flag in missing):
      return Tried(given, figures)
    lacked |= missing


def _is_in(flag: str, sets: Sequence[str]) -> bool:
  return any(f"--{flag}=" in flags.SETS[name] for name in sets)

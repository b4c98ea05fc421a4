# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Searches the sets of XLA flags with which a step is projected to be fastest. No JAX."""

from collections.abc import Callable, Iterator, Mapping, Sequence
import math
from typing import Any

from maxtext_pp_ext.compiled import flags

Sets = tuple[str, ...]  # names of sets of flags, of `flags.SETS`
Figures = dict[str, Any]  # of a step, see `compare.figures`

MOST = 3  # sets in a combination
_GAIN = 1e-3  # share of the step that another set has to gain; the tables show no less


def search(compiled: Callable[[Sets], Figures], own: str = "") -> tuple[Sets, dict[Sets, Figures]]:
  """Tries no set, each set alone, and then the best with each other one that alone made the step faster.

  It goes on until no further set makes the step faster, or the combination has `MOST` sets. Sets whose flags contradict
  flags that are given are not tried. Those that the compiler refuses are tried, and are not the best.

  Args:
    compiled: (sets) -> the figures of the step with these sets, or `failure`.
    own: the run's own `compile_xla_flags`, which stay.

  Returns:
    (the best sets, the figures of all that was tried). The best are empty if no set makes the step faster.
  """
  rows = {(): compiled(())}
  best, useful = (), list(flags.SETS)
  while len(best) < MOST:
    for sets in _combinations(best, useful, own):
      rows[sets] = compiled(sets)
    if not best:
      useful = [name for name in useful if _is_faster(rows.get((name,), {}), rows[()])]
    fastest = min(rows, key=lambda sets: _seconds(rows[sets]))
    if not _is_faster(rows[fastest], rows[best]):
      break
    best = fastest
  return best, rows


def seconds(figures: Mapping[str, Any]) -> float | None:
  """Projected seconds of a step; None if it was not compiled."""
  return figures.get("projection", {}).get("step_s")


def _is_faster(figures: Figures, base: Figures) -> bool:
  return _seconds(figures) < (1 - _GAIN) * _seconds(base)


def _seconds(figures: Figures) -> float:
  found = seconds(figures)
  return math.inf if found is None else found


def _combinations(best: Sets, names: Sequence[str], own: str) -> Iterator[Sets]:
  """Yields the best sets with each other one that adds a flag and contradicts none."""
  before = flags.joined(own, best)
  for name in names:
    try:
      if flags.joined(own, [*best, name]) != before:
        yield (*best, name)
    except ValueError:  # a flag would have two values
      continue

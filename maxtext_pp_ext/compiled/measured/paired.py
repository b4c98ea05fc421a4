# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Times of several steps that take turns, so that other load on the machine affects all alike. No JAX."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import statistics
import time
from typing import Any

_WARM_UP = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quartiles:
  """Median and quartiles of some values."""

  median: float
  lower_quartile: float
  upper_quartile: float


def measure(
    steps: Mapping[str, Callable[[], Any]], rounds: int, on_round: Callable[[int], None] = lambda done: None
) -> dict[str, list[float]]:
  """Measures the seconds of each step in each round.

  In a round each step runs once. The order rotates, so each step takes each place in turn. Before the first round, each
  step runs twice unmeasured, since first runs allocate memory.

  Args:
    steps: functions that run a step and wait until it is done.
    rounds: number of rounds.
    on_round: called with the number of finished rounds, after each round and, with 0, before the first.
  """
  for step in steps.values():
    for _ in range(_WARM_UP):
      step()
  on_round(0)
  names = list(steps)
  seconds: dict[str, list[float]] = {name: [] for name in steps}
  for number in range(rounds):
    turn = number % len(names)
    for name in names[turn:] + names[:turn]:
      start = time.perf_counter()
      steps[name]()
      seconds[name].append(time.perf_counter() - start)
    on_round(number + 1)
  return seconds


def ratio(seconds: Sequence[float], base: Sequence[float]) -> Quartiles:
  """The time of one step as a multiple of another's, from times measured in the same rounds."""
  return quartiles([mine / other for mine, other in zip(seconds, base, strict=True)])


def quartiles(values: Sequence[float]) -> Quartiles:
  """The quartiles of at least one value, between neighbours where there is none at that place."""
  if len(values) == 1:
    return Quartiles(median=values[0], lower_quartile=values[0], upper_quartile=values[0])
  lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
  return Quartiles(median=median, lower_quartile=lower, upper_quartile=upper)

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""What the engine, the pipelines, the pictures and the formulas of costs ask of a schedule."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

# A Python int, a NumPy array or a traced JAX integer: the arithmetic of a schedule is the same for all of them.
Int = Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phase:
  """Iterations that follow each other and in which the same happens.

  Where nothing is to be done, `advances` and `reduces` cost transfers and change no result; with one repeat both must be
  False.

  Attributes:
    first: the first of them; backward, which goes through them in reverse, ends with it.
    count: how many there are, at least 1.
    advances: whether stages go over to another repeat in or after them, so that its weights have to be fetched, and the
      sums of gradients of the repeat that a stage leaves have to be put aside.
    reduces: whether sums of gradients that were put aside may wait for their reduction.
  """

  first: int
  count: int
  advances: bool
  reduces: bool = False


class Schedule(Protocol):
  """An order in which each stage works through its M·R items, one in an iteration. S stages, iterations 0 … T − 1.

  All arithmetic is on integers of any type, elementwise; `s` is a stage's number, 0 … S − 1, and `t` an iteration.
  `CircularSchedule` is one, and says what its methods return.
  """

  @classmethod
  def of_config(cls, config: Any) -> Schedule:
    """The schedule of a config that has MaxText's keys of pipelines, with the values that MaxText derives."""

  @property
  def stages(self) -> int:
    """S."""

  @property
  def microbatches(self) -> int:
    """M."""

  @property
  def repeats(self) -> int:
    """R."""

  @property
  def delay(self) -> int:
    """D: iterations from a stage's output to its use by the next stage."""

  @property
  def iterations(self) -> int:
    """T."""

  @property
  def bubble_fraction(self) -> float:
    """The share of a stage's iterations in which it is idle, 0 … 1."""

  def item(self, t: Int, s: Int) -> Int:
    """The item that stage s is at; outside [0, M·R) it is a bubble."""

  def is_bubble(self, t: Int, s: Int) -> Int:
    """Whether stage s is idle."""

  def microbatch(self, t: Int, s: Int) -> Int:
    """The microbatch that stage s is at, in [0, M) also where it is idle."""

  def repeat(self, t: Int, s: Int) -> Int:
    """The repeat that stage s is at; outside [0, R) where it is idle."""

  def iteration(self, repeat: Int, microbatch: Int, s: Int) -> Int:
    """When stage s works on a microbatch in a repeat: the one iteration at which it is at both and not idle."""

  def begins_repeat(self, item: Int) -> Int:
    """Whether an item is the first of its repeat."""

  def ends_repeat(self, item: Int) -> Int:
    """Whether an item is the last of its repeat."""

  def arrival(self, t: Int) -> Int:
    """The item whose output has come from the last stage back to stage 0 at the end of iteration t."""

  def forward_phases(self, *, advances: bool) -> list[Phase]:
    """All iterations in the order in which forward goes through them."""

  def backward_phases(self, *, advances: bool, reduces: bool) -> list[Phase]:
    """All iterations in the order in which backward goes through them, from the last one on."""

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The interface of a schedule, for the engine, the pipelines, the pictures and the cost formulas."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

# A Python int, a NumPy array or a traced JAX integer: the arithmetic of a schedule is the same for all of them.
Int = Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phase:
  """Successive iterations that run the same program.

  If `advances` or `reduces` is True without need, it costs transfers and changes no result. With one repeat both must be
  False.
  """

  first: int  #: the first iteration of the phase. Backward runs the phase in reverse, so it ends with this iteration.
  count: int  #: number of iterations, at least 1
  #: Whether stages advance to another repeat in or after the phase: its weights have to be fetched, and the sums of
  #: gradients of the repeat that a stage leaves have to be set aside.
  advances: bool
  reduces: bool = False  #: whether sums of gradients that were set aside may wait for reduction


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule(Protocol):
  """An order in which each stage works through its M·R items, one per iteration. S stages, iterations 0 … T − 1.

  All arithmetic is on integers of any type, elementwise; `s` is a stage's number, 0 … S − 1, and `t` an iteration.
  `CircularSchedule` is an example.
  """

  stages: int  #: S ≥ 1
  microbatches: int  #: M ≥ 1
  repeats: int  #: R ≥ 1, how often a microbatch passes through the ring of stages
  #: D, 1 or 2, iterations from a stage's output to its use by the next stage; with 2, compute hides the transfer.
  delay: int = 1

  @classmethod
  def of_config(cls, config: Any) -> Schedule:
    """The schedule of a config with MaxText's pipeline keys and the values that MaxText derives."""

  @property
  def iterations(self) -> int:
    """T."""

  @property
  def bubble_fraction(self) -> float:
    """The share of the iterations in which a stage is idle, 0 … 1."""

  def item(self, t: Int, s: Int) -> Int:
    """The item that stage s works on at iteration t; outside [0, M·R) in a bubble."""

  def is_bubble(self, t: Int, s: Int) -> Int:
    """Whether stage s is idle at iteration t."""

  def microbatch(self, t: Int, s: Int) -> Int:
    """The microbatch of stage s at iteration t; in [0, M) also in a bubble."""

  def repeat(self, t: Int, s: Int) -> Int:
    """The repeat of stage s at iteration t; outside [0, R) in a bubble."""

  def iteration(self, repeat: Int, microbatch: Int, s: Int) -> Int:
    """The iteration at which stage s works on a microbatch in a repeat. There is exactly one."""

  def begins_repeat(self, item: Int) -> Int:
    """Whether an item is the first of its repeat."""

  def ends_repeat(self, item: Int) -> Int:
    """Whether an item is the last of its repeat."""

  def arrival(self, t: Int) -> Int:
    """The item whose output has arrived at stage 0, from the last stage, at the end of iteration t."""

  def forward_phases(self, *, advances: bool) -> list[Phase]:
    """All iterations in the order in which forward runs them.

    Args:
      advances: whether stages keep weights, which they have to replace by those of the next repeat.
    """

  def backward_phases(self, *, advances: bool, reduces: bool) -> list[Phase]:
    """All iterations in the order in which backward runs them, from the last to the first.

    Args:
      advances: whether stages keep weights or sums of gradients of a repeat.
      reduces: whether there are sums of gradients to be reduced when a repeat is finished.
    """

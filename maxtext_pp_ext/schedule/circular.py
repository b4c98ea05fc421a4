# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""What a schedule is, and the circular (breadth-first) pipeline schedule.

Symbols, used everywhere in this package: S stages, M microbatches, R repeats, D forwarding delay, t iteration.

All microbatches of a repeat enter the pipeline before the next repeat begins. So a weight is needed in one run of
consecutive iterations only, and the stages use at most two successive repeats at any iteration. See Lamy-Poirier,
"Breadth-First Pipeline Parallelism" (2022), https://arxiv.org/abs/2211.05953.
"""

from __future__ import annotations

import dataclasses
import itertools
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
  #: Whether any stage goes on to another repeat in the phase or after it. Then its weights are fetched in the phase, and
  #: in backward a stage that goes on sets the sum of its gradients aside.
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
  #: Whether stages are on different slices, between which transfers take long. Then idle stages pass microbatches on.
  over_slices: bool = False

  @classmethod
  def of_config(cls, config: Any) -> Schedule:
    """The schedule of a config with MaxText's pipeline keys and the values that MaxText derives."""

  @property
  def iterations(self) -> int:
    """T."""

  @property
  def bubble_fraction(self) -> float:
    """The share of the iterations in which a stage has no item, 0 … 1."""

  def item(self, t: Int, s: Int) -> Int:
    """The item that stage s works on at iteration t; outside [0, M·R) in a bubble."""

  def is_bubble(self, t: Int, s: Int) -> Int:
    """Whether stage s has no item at iteration t. What it computes then reaches nothing (`engine/ring.py`)."""

  def microbatch(self, t: Int, s: Int) -> Int:
    """The microbatch of stage s at iteration t; in [0, M) also in a bubble.

    Microbatches count in the order in which stages work on them. `moves.numbers` has their numbers in the batch.
    """

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class CircularSchedule(Schedule):
  """Circular schedule of M·R items over S stages.

  An item n in [0, M·R) is one microbatch in one repeat: microbatch `n mod M`, repeat `n div M`. Item n is on stage s
  at iteration `n + D·s`. The last stage's result of repeat r is the first stage's input of repeat r + 1, M iterations
  after that microbatch entered repeat r, so M ≥ D·S must hold.

  Each stage works through the items in order, so it is at repeat r for M iterations, from `r·M + D·s` on. At any time the
  stages are at two successive repeats at most. Stage s is idle in the first D·s iterations, and in the last
  D·(S − 1 − s).

  Raises:
    ValueError: if a value is out of range, naming it and what to set.
  """

  def __post_init__(self):
    for name in ("stages", "microbatches", "repeats", "delay"):
      value = getattr(self, name)
      if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a positive integer, got {value!r}.")
    if self.delay > 2:
      raise ValueError(f"delay must be 1 or 2 (pipeline_delay_activation_forwarding), got {self.delay}.")
    if self.microbatches % self.stages:
      below = self.microbatches // self.stages
      nearest = list(dict.fromkeys(str(max(count, self.delay) * self.stages) for count in (below, below + 1)))
      raise ValueError(
          f"microbatches ({self.microbatches}) must be a multiple of stages ({self.stages}); the nearest"
          f" {'are' if len(nearest) > 1 else 'is'} {' and '.join(nearest)}."
      )
    if self.microbatches < self.delay * self.stages:
      raise ValueError(
          f"microbatches ({self.microbatches}) must be at least delay × stages = {self.delay} × {self.stages} ="
          f" {self.delay * self.stages}: a microbatch needs that many iterations to come back to stage 0."
      )

  @classmethod
  def of_config(cls, config: Any) -> CircularSchedule:
    return cls(
        stages=config.ici_pipeline_parallelism * config.dcn_pipeline_parallelism,
        microbatches=config.num_pipeline_microbatches,
        repeats=config.num_pipeline_repeats,
        delay=2 if config.pipeline_delay_activation_forwarding else 1,
        over_slices=config.dcn_pipeline_parallelism > 1,
    )

  @property
  def items(self) -> int:
    """M·R: the number of items that each stage works on."""
    return self.microbatches * self.repeats

  @property
  def bubble_iterations(self) -> int:
    """D·(S − 1): the iterations in which a stage is idle; also the length of the warm-up and of the drain."""
    return self.delay * (self.stages - 1)

  @property
  def iterations(self) -> int:
    """T = M·R + D·(S − 1)."""
    return self.items + self.bubble_iterations

  @property
  def bubble_fraction(self) -> float:
    """D·(S − 1) / T: the share of the iterations in which a stage is idle, 0 … 1."""
    return self.bubble_iterations / self.iterations

  def item(self, t: Int, s: Int) -> Int:
    return t - self.delay * s

  def is_bubble(self, t: Int, s: Int) -> Int:
    n = self.item(t, s)
    if self.stages == 1:
      return (n < 0) & False  # never, which the compiler can tell
    return (n < 0) | (n >= self.items)

  def microbatch(self, t: Int, s: Int) -> Int:
    return self.item(t, s) % self.microbatches

  def repeat(self, t: Int, s: Int) -> Int:
    """The repeat of stage s at iteration t; −1 or R in a bubble."""
    return self.item(t, s) // self.microbatches

  def begins_repeat(self, item: Int) -> Int:
    return item % self.microbatches == 0

  def ends_repeat(self, item: Int) -> Int:
    return item % self.microbatches == self.microbatches - 1

  def arrival(self, t: Int) -> Int:
    """The item that the last stage finishes at iteration t − D + 1 and stage 0 has at the end of iteration t."""
    return t - self.delay * self.stages + 1

  def iteration(self, repeat: Int, microbatch: Int, s: Int) -> Int:
    """The iteration at which stage s works on microbatch m in repeat r: r·M + m + D·s."""
    return repeat * self.microbatches + microbatch + self.delay * s

  def forward_phases(self, *, advances: bool) -> list[Phase]:
    # In the last M iterations, every stage is at the last repeat or after it, so no stage advances to another repeat.
    advancing = self.iterations - self.microbatches if advances and self.repeats > 1 else 0
    bounds = sorted({0, advancing, self.iterations})
    return [Phase(first=low, count=high - low, advances=high <= advancing) for low, high in itertools.pairwise(bounds)]

  def backward_phases(self, *, advances: bool, reduces: bool) -> list[Phase]:
    # In the first M iterations, every stage is at repeat 0 or before it, so no stage advances to another repeat. In the
    # last M, every stage is at the last repeat or after it: no repeat is finished yet, so no sums wait for reduction.
    several = self.repeats > 1
    advancing = self.microbatches if advances and several else self.iterations
    reducing = self.iterations - self.microbatches if reduces and several else 0
    bounds = sorted({0, advancing, reducing, self.iterations}, reverse=True)
    return [
        Phase(first=low, count=high - low, advances=low >= advancing, reduces=high <= reducing)
        for high, low in itertools.pairwise(bounds)
    ]

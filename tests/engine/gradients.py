# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs backward programs with weights that keep what they are given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any

import jax.numpy as jnp

from maxtext_pp_ext.engine.order import in_order
from maxtext_pp_ext.engine.programs.partial import GradientProgram
from maxtext_pp_ext.engine.weights.accumulators import Accumulated

NO_ITEM: Any = None


class PartialSum:
  """In the place of a `Gradient`: a partial sum that is there already."""

  is_partial, on_device = True, None

  def compute(self, of_roots: Any, factors: Any) -> Any:
    assert not factors
    return of_roots


@dataclasses.dataclass(frozen=True)
class Kept:
  """In the place of a `Weight`: keeps the gradient instead of adding it to a sum.

  Attributes:
    compute: of the operands of a gradient, the gradient.
    before: what is computed before it.
    gradient: the gradient, [F, …].
    arriving: no chunk.
  """

  compute: Callable
  before: Any = None
  gradient: Any = None
  arriving: None = None
  overlapped = ("before",)

  def with_(self, **changes: Any) -> Kept:
    return dataclasses.replace(self, **changes)

  def accumulate(self, operands: Any, item: Any) -> Accumulated:
    assert item is NO_ITEM
    return Accumulated(self.compute(operands))

  def added(self, arrays: Accumulated) -> Kept:
    return self.with_(gradient=arrays.total)


def evaluated(
    program: GradientProgram,
    args: Sequence[Any],
    before: Sequence[Any] | None = None,
    behind: Any = None,
    compute: Callable | None = None,
) -> tuple[list[Any], list[Any], list[Any], Any]:
  """(gradients, each [F, …] with its own F, other outputs, `before`, `behind`).

  Args:
    program: the program.
    args: its inputs.
    before: for each gradient what is computed before it.
    behind: what is computed behind `program.gathers_after`.
    compute: (number, gradient's `compute`, operands) -> what is kept of the gradient; by default the gradient.
  """
  before = [None] * len(program.gradients) if before is None else before
  compute = compute or (lambda number, of, operands: of(*operands))
  bound = lambda number, each: Kept(lambda operands: compute(number, each.compute, operands), before[number])
  weights = [bound(number, each) for number, each in enumerate(program.gradients)]
  done = in_order(program, args, weights, NO_ITEM, jnp.zeros(()), behind)
  kept = [w.gradient if done.complete[k] is None else done.complete[k][None] for k, w in enumerate(done.weights)]
  return kept, done.others, [w.before for w in done.weights], done.behind

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Weight gradients as explicit partial sums, so that they cross device boundaries once per repeat.

A weight's gradient is a sum over the batch, which is sharded over the data-like mesh axes. By default, the compiler
completes the sum (an all-reduce) where the gradient leaves the operation that computes it: at every iteration, or at the
end of a loop if it can move the reduction out of that loop. A partial sum cannot cross a loop's boundary, because
automatic sharding has no layout for a sum that is not complete.

This module gives a partial sum a layout: a leading axis. The operation at the root of each gradient (a matrix product or
a sum that contracts the batch) is rewritten to contract within each of F equal parts of the batch. The parts become a
leading axis of the result, sharded over the data-like axes. Each device computes the same product as before, and adding
such values up over iterations and loops needs no communication. The sum over the leading axis remains, and is done once.

The factors of these products are computed once, before all that use them (`jaxprs.compute_once`). Left to itself, the TPU
compiler (libtpu 0.0.48.1) computes an activation's derivative again within each product: Llama 3 70B's backward took 14 %
longer by its own estimate (docs/seconds.md).

The rewrite is algebra, true whatever the layouts are: Σ_b = Σ_f Σ_{b in part f}. Layouts decide only how fast it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from maxtext_pp_ext.engine.programs.jaxprs import compute_once, count_uses, inline, makers_of, select_eqns
from maxtext_pp_ext.engine.programs.roots import BatchSplit, expose_sums, find, Root
from maxtext_pp_ext.jax_private import ClosedJaxpr, jaxpr_as_fun, JaxprEqn, Var

PyTree = Any
_SHAPES_ONLY = frozenset({"reshape", "transpose", "squeeze", "expand_dims"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class GradientProgram:
  """A backward program whose first outputs are weight gradients, taken apart at their roots.

  Attributes:
    body: everything else; (inputs) -> each gradient's operands of roots and factors, then the outputs that have no root.
    roots: for each gradient its roots, or None if it has none that can be split.
    tails: for each gradient with roots the operations that follow them, (results of the roots, factors) -> gradient.
    num_factors: for each gradient the number of its tail's inputs that do not come from its roots.
    parts: for each gradient F; 1 without roots.
    num_rest: the number of outputs that have no root.
  """

  body: ClosedJaxpr
  roots: tuple[tuple[Root, ...] | None, ...]
  tails: tuple[ClosedJaxpr | None, ...]
  num_factors: tuple[int, ...]
  parts: tuple[int, ...]
  num_rest: int

  @classmethod
  def plan(
      cls, closed: ClosedJaxpr, splits: Sequence[Sequence[BatchSplit]], batch_axes: Sequence[str]
  ) -> GradientProgram:
    """Finds the roots of the first `len(splits)` outputs.

    Args:
      closed: the backward program.
      splits: for each gradient the batch axes to split. A gradient stays whole if its split is empty, or if no axis of
        the root's contraction fits the split.
      batch_axes: the mesh axes that shard the batch, in the order in which a leading axis of parts is sharded.
    """
    splits = [tuple(s for s in split if s.parts > 1) for split in splits]
    axes = tuple(batch_axes) if any(splits) else ()
    whole = inline(closed, lambda eqn, values: expose_sums(eqn, values, axes))
    jaxpr = whole.jaxpr
    uses, made_by = count_uses(jaxpr), makers_of(jaxpr)
    found = [
        find(out, made_by, uses, split) if split else None
        for out, split in zip(jaxpr.outvars[: len(splits)], splits, strict=True)
    ]
    taken = {id(eqn) for one in found if one for eqn in one.taken}
    operands = [v for one in found if one for v in (*(v for root in one.roots for v in root.eqn.invars), *one.factors)]
    rest = [out for k, out in enumerate(jaxpr.outvars) if k >= len(found) or found[k] is None]
    kept = [eqn for eqn in jaxpr.eqns if id(eqn) not in taken]
    body = select_eqns(whole, kept, jaxpr.invars, [*operands, *rest], consts=True)
    factors = [v for one in found if one for root in one.roots for v in root.eqn.invars if _is_product(root)]
    return cls(
        body=compute_once(body, {source for v in factors if (source := _computed(v, made_by)) is not None}),
        roots=tuple(tuple(one.roots) if one else None for one in found),
        tails=tuple(
            select_eqns(
                whole, one.tail, [*(root.eqn.outvars[0] for root in one.roots), *one.factors], [one.out], consts=False
            )
            if one
            else None
            for one in found
        ),
        num_factors=tuple(len(one.factors) if one else 0 for one in found),
        parts=tuple(math.prod(s.parts for s in split) if one else 1 for one, split in zip(found, splits, strict=True)),
        num_rest=len(rest),
    )

  def run(
      self, args: Sequence[jax.Array], overlapped: Sequence[PyTree]
  ) -> tuple[list[jax.Array], list[jax.Array], list[PyTree]]:
    """Runs the program.

    Args:
      args: the program's inputs.
      overlapped: for each gradient, arrays or None, to be computed before the gradient.

    Returns:
      (gradients, each [F, …] with its own F, other outputs, `overlapped`).
    """
    values = jaxpr_as_fun(self.body)(*args)
    operands, rest = iter(values[: len(values) - self.num_rest]), iter(values[len(values) - self.num_rest :])
    gradients, after = [], []
    for roots, tail, num_factors, before in zip(self.roots, self.tails, self.num_factors, overlapped, strict=True):
      if roots is None:
        gradients.append(next(rest)[None])
      else:
        results = []
        for root in roots:
          given = [next(operands) for _ in root.eqn.invars]
          # Tied to the smallest operand, of which a copy costs least.
          smallest = min(range(len(given)), key=[x.size for x in given].__getitem__)
          given[smallest], before = jax.lax.optimization_barrier((given[smallest], before))
          results.append(_run_root(root, given))
        factors = [next(operands) for _ in range(num_factors)]
        in_axes = (0,) * len(results) + (None,) * num_factors
        gradients += jax.vmap(jaxpr_as_fun(tail), in_axes=in_axes)(*results, *factors)
      after.append(before)
    return gradients, list(rest), after


def _is_product(root: Root) -> bool:
  return root.eqn.primitive.name == "dot_general"


def _computed(var: Any, made_by: Mapping[Var, JaxprEqn]) -> Var | None:
  """The array that a product's factor is, but for its shape; None if it is an input."""
  eqn = made_by.get(var) if isinstance(var, Var) else None
  while eqn is not None and eqn.primitive.name in _SHAPES_ONLY:
    var = eqn.invars[0]
    eqn = made_by.get(var) if isinstance(var, Var) else None
  return None if eqn is None else var


def _run_root(root: Root, operands: list[jax.Array]) -> jax.Array:
  """The root with a leading axis of parts [F, …]."""
  if root.axes is None:
    return operands[0]
  split_operands = []
  for k, x in enumerate(operands):
    shape = list(x.shape)
    for axes, parts in sorted(root.axes, key=lambda c: -c[0][k]):
      shape[axes[k] : axes[k] + 1] = [parts, shape[axes[k]] // parts]
    order = [axes[k] for axes, _ in root.axes]
    moved = [axis + sum(other < axis for other in order) for axis in order]
    split_operands.append(jnp.moveaxis(x.reshape(shape), moved, range(len(moved))))
  one = functools.partial(root.eqn.primitive.bind, **root.eqn.params)
  for _ in root.axes:
    one = jax.vmap(one)
  result = one(*split_operands)
  return result.reshape((-1,) + result.shape[len(root.axes) :])

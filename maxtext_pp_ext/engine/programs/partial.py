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

The factors of these products are computed once, before all that use them (`jaxprs.compute_once`). Left to itself, the
TPU compiler (libtpu 0.0.48.1; benchmarks.workarounds factor_of_products) computes an activation's derivative again within
each product: Llama 3 70B's backward took 14 % longer by its own estimate (docs/seconds.md). So are lanes that are cut out
of kernels' results (`operands.parts_of_kernels`).

The rewrite is algebra, true whatever the layouts are: Σ_b = Σ_f Σ_{b in part f}. Layouts decide only how fast it is.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp

from maxtext_pp_ext.engine import exchanges
from maxtext_pp_ext.engine.programs import operands
from maxtext_pp_ext.engine.programs.jaxprs import (
    compute_once,
    count_uses,
    following,
    inline,
    makers_of,
    origin,
    readers,
    select_eqns,
    variables,
)
from maxtext_pp_ext.engine.programs.parts_on_device import on_device, OnDevice
from maxtext_pp_ext.engine.programs.primitives import has, Trait
from maxtext_pp_ext.engine.programs.roots import BatchSplit, expose_sums, find, Found, Root
from maxtext_pp_ext.engine.programs.segments import cut, Segment, with_last_gradients
from maxtext_pp_ext.engine.shapes import Accumulator
from maxtext_pp_ext.jax_private import ClosedJaxpr, Jaxpr, jaxpr_as_fun, JaxprEqn, Literal, Var


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Gradient:
  """A weight's gradient in a backward program; of one without roots that can be split, only `complete` is known."""

  complete: Var | Literal | None = None  # without roots the variable of the program that it is; otherwise None
  roots: tuple[Root, ...] = ()  # the operations that sum it over the batch
  tail: ClosedJaxpr | None = None  # the operations that follow, (results of the roots, factors) -> gradient
  # the variables of the program that it is computed from: operands of its roots, then factors
  needs: tuple[Var | Literal, ...] = ()
  parts: int = 1  # F
  on_device: OnDevice | None = None  # how a device computes its part of it, or None
  readers: tuple[Var, ...] = ()  # the variables of the program after which nothing reads the weight any more
  is_early: bool = False  # whether it needs no other product of backward, and is not computed last

  @property
  def is_partial(self) -> bool:
    """Whether it is left as a partial sum."""
    return self.parts > 1

  def compute(self, of_roots: Sequence[Sequence[jax.Array]], factors: Sequence[jax.Array]) -> Accumulator:
    """The gradient, with a part for each device.

    Args:
      of_roots: the operands of each root.
      factors: what the tail takes in addition to the roots' results.
    """
    results = [_run_root(root, of_roots[k]) for k, root in enumerate(self.roots)]
    in_axes = (0,) * len(results) + (None,) * len(factors)
    (gradient,) = jax.vmap(jaxpr_as_fun(self.tail), in_axes=in_axes)(*results, *factors)
    return gradient


@dataclasses.dataclass(frozen=True, kw_only=True)
class GradientProgram:
  """A backward program whose first outputs are weight gradients, taken apart at their roots.

  `engine/order.py` runs it.
  """

  inputs: tuple[Var, ...]  # the program's inputs
  # the program without roots and tails, in parts, after each of which gradients are computed
  segments: tuple[Segment, ...]
  gradients: tuple[Gradient, ...]  # one for each weight
  others: tuple[Var | Literal, ...]  # the variables of the outputs behind the gradients
  # the number of the segment behind which the next weights' all-gathers begin, at the latest with the gradients of the
  # iteration before reduced; None if gathers may run beside reductions. It is the segment in the middle, since gathers
  # and reductions send as much.
  gathers_after: int | None

  @functools.cached_property
  def exchanges_in(self) -> int | None:
    """The number of the segment before whose last exchange of tokens transfers of weights end.

    Where gathers begin behind them, it is `gathers_after` or comes before it. Elsewhere it is no earlier than the middle.
    None if no such segment has experts that exchange tokens.
    """
    count = len(self.segments)
    possible = range((count - 1) // 2, count) if self.gathers_after is None else range(self.gathers_after + 1)
    return max((k for k in possible if exchanges.count(self.segments[k].program)), default=None)

  @classmethod
  def plan(
      cls,
      closed: ClosedJaxpr,
      splits: Sequence[Sequence[BatchSplit]],
      batch_axes: Sequence[str],
      num_cotangents: int,
      on_sparsecores: bool = False,
      reads: Sequence[Collection[int]] | None = None,
      num_residuals: int = 0,
  ) -> GradientProgram:
    """Finds the roots of the first `len(splits)` outputs. The last output is the cotangent of the activation.

    Args:
      closed: the backward program.
      splits: for each gradient the batch axes to split. A gradient stays whole if its split is empty, or if no axis of
        the root's contraction fits the split.
      batch_axes: the mesh axes that shard the batch, in the order in which a leading axis of parts is sharded.
      num_cotangents: the number of inputs that are cotangents, which come last.
      on_sparsecores: whether weights are gathered on the SparseCores, beside the program. Reductions and gathers are then
        kept apart (`gathers_after`), and the last gradients moved (`segments.with_last_gradients`).
      reads: for each gradient the numbers of the inputs that are its weight, or are computed from weights alone.
      num_residuals: the number of inputs that forward saved, which come before the cotangents.
    """
    splits = [tuple(s for s in split if s.parts > 1) for split in splits]
    axes = tuple(batch_axes) if any(splits) else ()
    whole = inline(closed, lambda eqn, values: expose_sums(eqn, values, axes))
    uses, made_by = count_uses(whole.jaxpr), makers_of(whole.jaxpr)
    found = [find(whole.jaxpr.outvars[i], made_by, uses, split) if split else None for i, split in enumerate(splits)]
    body, needs, rest = _without_roots(whole, found)
    first = len(body.jaxpr.invars) - num_cotangents
    cotangents, saved = body.jaxpr.invars[first:], body.jaxpr.invars[first - num_residuals : first]
    saved = [v for v in saved if v.aval.memory_space == jax.memory.Space.Device]
    activation_bytes = sum(v.aval.size * v.aval.dtype.itemsize for v in rest[-1:])
    of_weights = [{body.jaxpr.invars[k] for k in inputs} for inputs in reads or [()] * len(splits)]
    last_readers = [_last_readers(body.jaxpr, own, needs[i]) for i, own in enumerate(of_weights)]
    needed = [(*each, *last_readers[i]) for i, each in enumerate(needs)]
    segments = cut(body, needed, cotangents, activation_bytes, saved)
    count, gathers_after = len(segments), None
    if on_sparsecores and count > 1:
      gathers_after = (count - 1) // 2
      sizes = [v.aval.size for v in whole.jaxpr.outvars[: len(splits)]]
      segments = with_last_gradients(segments, needs, rest, sizes)
    moved = {i for segment in segments[count:] for i in segment.done}
    early = _early(body.jaxpr.eqns, needs, cotangents).difference(moved)
    others = iter(rest)
    gradients = tuple(
        Gradient(complete=next(others))
        if one is None
        else Gradient(
            roots=tuple(one.roots),
            tail=select_eqns(whole, one.tail, [*one.results, *one.factors], [one.out], consts=False),
            needs=needs[i],
            parts=math.prod(s.parts for s in splits[i]),
            on_device=on_device(one, splits[i]),
            readers=last_readers[i],
            is_early=i in early,
        )
        for i, one in enumerate(found)
    )
    return cls(
        inputs=tuple(body.jaxpr.invars),
        segments=segments,
        gradients=gradients,
        others=tuple(others),
        gathers_after=gathers_after,
    )


def _without_roots(
    whole: ClosedJaxpr, found: Sequence[Found | None]
) -> tuple[ClosedJaxpr, list[tuple[Var | Literal, ...]], tuple[Var | Literal, ...]]:
  """(the program up to the roots, for each gradient the variables that it needs, the outputs that have no root)."""
  jaxpr = whole.jaxpr
  taken = {id(eqn) for one in found if one for eqn in one.taken}
  needed = [v for one in found if one for v in one.needs]
  others = [out for k, out in enumerate(jaxpr.outvars) if k >= len(found) or found[k] is None]
  kept = [eqn for eqn in jaxpr.eqns if id(eqn) not in taken]
  body = select_eqns(whole, kept, jaxpr.invars, [*needed, *others], consts=True)
  factors = [v for one in found if one for root in one.roots for v in root.eqn.invars if _is_product(root)]
  made_by = makers_of(jaxpr)
  # The arrays that factors are, but for their shapes.
  sources = variables([origin(v, made_by, Trait.RESHAPES) for v in factors])
  body = compute_once(body, {v for v in sources if v in made_by} | operands.parts_of_kernels(body.jaxpr))
  given = iter(body.jaxpr.outvars)
  needs = [tuple(itertools.islice(given, len(one.needs) if one else 0)) for one in found]
  return body, needs, tuple(given)


def _early(eqns: Sequence[JaxprEqn], needs: Sequence[Sequence[Var | Literal]], cotangents: Sequence[Var]) -> set[int]:
  """The gradients whose operands follow from the cotangents without anything that takes long."""
  after = following(eqns, cotangents)
  long = [eqn for eqn in eqns if has(eqn, Trait.LONG) and not after.isdisjoint(variables(eqn.invars))]
  late = following(eqns, [v for eqn in long for v in eqn.outvars])
  own = [variables(each) for each in needs]
  return {i for i, each in enumerate(own) if not after.isdisjoint(each) and late.isdisjoint(each)}


def _last_readers(jaxpr: Jaxpr, weight: Collection[Var], needs: Sequence[Var | Literal]) -> tuple[Var, ...]:
  """The variables that, with those that a gradient needs, are there when nothing reads its weight any more.

  Args:
    jaxpr: the program.
    weight: the inputs that are the weight, or are computed from weights alone.
    needs: the variables that the gradient is computed from; () for a gradient without roots.
  """
  if not weight or not needs:
    return ()
  after: dict[Var, frozenset[int]] = {}
  read = readers(jaxpr, set(weight), after)
  missing = read.difference(*(after.get(v, ()) for v in variables(needs)))
  last = []
  for eqn in jaxpr.eqns:  # the first that are there, of each operation the smallest that is enough
    for v in sorted(eqn.outvars, key=lambda v: (len(missing - after.get(v, frozenset())), v.aval.size)):
      if missing & after.get(v, frozenset()):
        last.append(v)
        missing -= after[v]
  return tuple(last)


def _is_product(root: Root) -> bool:
  """Whether it is a product of matrices. In a sum of elementwise products, each element of a factor is read once."""
  if root.eqn.primitive.name != "dot_general":
    return False
  contracted, batch = root.eqn.params["dimension_numbers"]
  return all(len(contracted[k]) + len(batch[k]) < v.aval.ndim for k, v in enumerate(root.eqn.invars))


def _run_root(root: Root, operands: Sequence[jax.Array]) -> jax.Array:
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

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

from collections.abc import Callable, Collection, Mapping, Sequence
import dataclasses
import functools
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from maxtext_pp_ext.engine.programs import one_of
from maxtext_pp_ext.engine.programs.jaxprs import compute_once, count_uses, inline, makers_of, readers, select_eqns
from maxtext_pp_ext.engine.programs.parts_on_device import on_device, OnDevice
from maxtext_pp_ext.engine.programs.roots import BatchSplit, expose_sums, find, Found, Root
from maxtext_pp_ext.engine.programs.segments import cut, following, Segment, variables, with_last_gradients
from maxtext_pp_ext.jax_private import ClosedJaxpr, Jaxpr, jaxpr_as_fun, JaxprEqn, Literal, Var

PyTree = Any
_SHAPES_ONLY = frozenset({"reshape", "transpose", "squeeze", "expand_dims"})
# What takes long: products, kernels, loops.
_LONG = frozenset(
    {"dot_general", "ragged_dot_general", "pallas_call", "shard_map", "scan", "while", "cond", "custom_vjp_call"}
)


class Summand(NamedTuple):
  """A gradient of one iteration, before it is computed.

  Attributes:
    compute: () -> the gradient, [F, …].
    operands: what a device computes its part from (`GradientProgram.parts_on_device`).
    overlapped: arrays that are computed before it.
  """

  compute: Callable[[], jax.Array]
  operands: Sequence[jax.Array]
  overlapped: PyTree = None


class Saved(NamedTuple):
  """A residual that forward saved, which backward reads where it needs it first.

  Attributes:
    read: (iteration) -> the residual.
    iteration: the iteration that saved it.
  """

  read: Callable[[jax.Array], jax.Array]
  iteration: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class GradientProgram:
  """A backward program whose first outputs are weight gradients, taken apart at their roots.

  Attributes:
    body: everything else; (inputs) -> each gradient's operands of roots and factors, then the outputs that have no root.
    roots: for each gradient its roots, or None if it has none that can be split.
    tails: for each gradient with roots the operations that follow them, (results of the roots, factors) -> gradient.
    needs: for each gradient with roots the variables of `body` that it is computed from: operands of its roots, factors.
    parts: for each gradient F; 1 without roots.
    rest: the variables of the outputs that have no root.
    segments: the parts of `body` after which gradients are computed.
    gathers_after: the number of the segment behind which the next weights' all-gathers begin; None if they may run beside
      reductions. By its end the gradients of the iteration before are reduced. It is in the middle: the two send as much.
    early: the numbers of the gradients with roots that need no other product of backward, and are not computed last.
    parts_on_device: for each gradient how a device computes its part of it, or None.
    readers: for each gradient the variables of `body` after which nothing reads its weight any more.
  """

  body: ClosedJaxpr
  roots: tuple[tuple[Root, ...] | None, ...]
  tails: tuple[ClosedJaxpr | None, ...]
  needs: tuple[tuple[Var | Literal, ...], ...]
  parts: tuple[int, ...]
  rest: tuple[Var | Literal, ...]
  segments: tuple[Segment, ...]
  gathers_after: int | None
  early: tuple[int, ...]
  parts_on_device: tuple[OnDevice | None, ...]
  readers: tuple[tuple[Var, ...], ...]

  @classmethod
  def plan(
      cls,
      closed: ClosedJaxpr,
      splits: Sequence[Sequence[BatchSplit]],
      batch_axes: Sequence[str],
      num_cotangents: int,
      gathered_in_steps: bool = False,
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
      gathered_in_steps: whether weights are gathered in steps beside the program. Reductions and gathers are then kept
        apart (`gathers_after`), and the last gradients moved (`segments.with_last_gradients`).
      reads: for each gradient the numbers of the inputs that are its weight, or are computed from weights alone.
      num_residuals: the number of inputs that forward saved, which come before the cotangents.
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
    others = [out for k, out in enumerate(jaxpr.outvars) if k >= len(found) or found[k] is None]
    kept = [eqn for eqn in jaxpr.eqns if id(eqn) not in taken]
    body = select_eqns(whole, kept, jaxpr.invars, [*operands, *others], consts=True)
    factors = [v for one in found if one for root in one.roots for v in root.eqn.invars if _is_product(root)]
    body = compute_once(body, {source for v in factors if (source := _computed(v, made_by)) is not None})
    given = iter(body.jaxpr.outvars)
    needs = tuple(tuple(itertools.islice(given, _num_operands(one))) for one in found)
    rest = tuple(given)
    first = len(body.jaxpr.invars) - num_cotangents
    cotangents, saved = body.jaxpr.invars[first:], body.jaxpr.invars[first - num_residuals : first]
    saved = [v for v in saved if v.aval.memory_space == jax.memory.Space.Device]
    activation_bytes = sum(v.aval.size * v.aval.dtype.itemsize for v in rest[-1:])
    of_weights = [{body.jaxpr.invars[k] for k in inputs} for inputs in reads or [()] * len(splits)]
    last_readers = _last_readers(body.jaxpr, of_weights, needs)
    needed = [(*a, *b) for a, b in zip(needs, last_readers, strict=True)]
    segments = cut(body, needed, cotangents, activation_bytes, saved)
    count, gathers_after = len(segments), None
    if gathered_in_steps and count > 1:
      gathers_after = (count - 1) // 2
      segments = with_last_gradients(segments, needs, rest, [v.aval.size for v in jaxpr.outvars[: len(splits)]])
    moved = {i for segment in segments[count:] for i in segment.done}
    return cls(
        body=body,
        roots=tuple(tuple(one.roots) if one else None for one in found),
        tails=tuple(
            select_eqns(
                whole, one.tail, [*(root.eqn.outvars[0] for root in one.roots), *one.factors], [one.out], consts=False
            )
            if one
            else None
            for one in found
        ),
        needs=needs,
        parts=tuple(math.prod(s.parts for s in split) if one else 1 for one, split in zip(found, splits, strict=True)),
        rest=rest,
        segments=segments,
        gathers_after=gathers_after,
        parts_on_device=tuple(on_device(one, split) if one else None for one, split in zip(found, splits, strict=True)),
        readers=tuple(last_readers),
        early=tuple(i for i in _early(body.jaxpr.eqns, needs, cotangents) if i not in moved),
    )

  def run(
      self,
      args: Sequence[Any],
      overlapped: Sequence[PyTree],
      add: Callable[[int, Summand], Any] | None = None,
      behind: PyTree = None,
  ) -> tuple[list[Any], list[jax.Array], list[PyTree], PyTree]:
    """Runs the program.

    Args:
      args: the program's inputs, arrays or `Saved`.
      overlapped: for each gradient, arrays or None, to be computed before the gradient, and before `behind`.
      add: (number, summand) -> what a gradient with roots is added to; it is returned instead of the gradient, and
        computed before the next segment. Nothing reads the gradient's weight after the summand.
      behind: arrays to be computed behind the segment `gathers_after`, and behind all that is `overlapped`.

    Returns:
      (gradients, each [F, …] with its own F, other outputs, `overlapped`, `behind`).
    """
    values: dict[Any, Any] = dict(zip(self.body.jaxpr.invars, args, strict=True))

    def value(v: Var) -> Any:
      if isinstance(values[v], Saved):
        values[v] = values[v].read(values[v].iteration)
      return values[v]

    read = lambda v: one_of.chosen(value(v)) if isinstance(v, Var) else v.val
    gradients: list[Any] = [None] * len(self.roots)
    after = list(overlapped)
    for number, segment in enumerate(self.segments):
      results = one_of.run(segment.program, *map(value, segment.inputs))
      values |= zip(segment.outputs, results, strict=True)
      done = [i for i in segment.done if self.roots[i] is not None]
      for i in done:
        readers = [value(v) for v in self.readers[i]]
        summand, after[i] = self._summand(i, [read(v) for v in self.needs[i]], readers, after[i])
        gradients[i] = summand.compute() if add is None else add(i, summand)
      if segment.crossing or number == self.gathers_after:
        before = [values[v] for v in segment.crossing]
        crossing = [x.iteration if isinstance(x, Saved) else x for x in before]
        now = [gradients[i] for i in done]
        if number == self.gathers_after:
          crossing, now, after, behind = jax.lax.optimization_barrier((crossing, now, after, behind))
        else:
          crossing, now = jax.lax.optimization_barrier((crossing, now))
        for v, old, new in zip(segment.crossing, before, crossing, strict=True):
          values[v] = old._replace(iteration=new) if isinstance(old, Saved) else new
        for i, gradient in zip(done, now, strict=True):
          gradients[i] = gradient
    rest = iter([read(v) for v in self.rest])
    gradients = [next(rest)[None] if roots is None else g for g, roots in zip(gradients, self.roots, strict=True)]
    return gradients, list(rest), after, behind

  def _summand(
      self, number: int, needs: list[jax.Array], readers: list[jax.Array], before: PyTree
  ) -> tuple[Summand, PyTree]:
    operands, of_roots = iter(needs), []
    for root in self.roots[number] or ():
      given = list(itertools.islice(operands, len(root.eqn.invars)))
      # Tied to the smallest operand, of which a copy costs least.
      smallest = min(range(len(given)), key=[x.size for x in given].__getitem__)
      given[smallest], before, readers = jax.lax.optimization_barrier((given[smallest], before, readers))
      of_roots.append(given)
    factors = list(operands)

    def compute() -> jax.Array:
      results = [_run_root(*each) for each in zip(self.roots[number] or (), of_roots, strict=True)]
      in_axes = (0,) * len(results) + (None,) * len(factors)
      (gradient,) = jax.vmap(jaxpr_as_fun(self.tails[number]), in_axes=in_axes)(*results, *factors)
      return gradient

    return Summand(compute, of_roots[0], before), before


def _early(
    eqns: Sequence[JaxprEqn], needs: Sequence[Sequence[Var | Literal]], cotangents: Sequence[Var]
) -> tuple[int, ...]:
  """The gradients whose operands follow from the cotangents without anything that takes long."""
  after = following(eqns, cotangents)
  long = [eqn for eqn in eqns if eqn.primitive.name in _LONG and not after.isdisjoint(variables(eqn.invars))]
  late = following(eqns, [v for eqn in long for v in eqn.outvars])
  own = [variables(each) for each in needs]
  return tuple(i for i, each in enumerate(own) if not after.isdisjoint(each) and late.isdisjoint(each))


def _last_readers(
    jaxpr: Jaxpr, weights: Sequence[Collection[Var]], needs: Sequence[Sequence[Var | Literal]]
) -> list[tuple[Var, ...]]:
  """For each gradient the variables that, with those that it needs, are there when nothing reads its weight any more.

  Args:
    jaxpr: the program.
    weights: for each gradient the inputs that are its weight, or are computed from weights alone.
    needs: for each gradient the variables that it is computed from; () for a gradient without roots.
  """
  found = []
  for own, needed in zip(weights, needs, strict=True):
    if not own or not needed:
      found.append(())
      continue
    after: dict[Var, frozenset[int]] = {}
    read = readers(jaxpr, set(own), after)
    missing = read.difference(*(after.get(v, ()) for v in variables(needed)))
    last = []
    for eqn in jaxpr.eqns:  # the first that are there, of each operation the smallest that is enough
      for v in sorted(eqn.outvars, key=lambda v: (len(missing - after.get(v, frozenset())), v.aval.size)):
        if missing & after.get(v, frozenset()):
          last.append(v)
          missing -= after[v]
    found.append(tuple(last))
  return found


def _num_operands(found: Found | None) -> int:
  return sum(len(root.eqn.invars) for root in found.roots) + len(found.factors) if found else 0


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

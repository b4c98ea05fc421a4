# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Finds the operations of a backward program that sum a weight's gradient over the batch: its roots.

A root is a matrix product or a sum that contracts the batch, or a sum over devices inside a `shard_map`. Only linear
operations follow between a root and the gradient, so they can act on each part of the sum alone.
"""

from collections.abc import Sequence
import math
from typing import NamedTuple

import jax
from jax.sharding import PartitionSpec as P

from maxtext_pp_ext.engine.programs.jaxprs import closed, count_uses, inner_program, makers_of, on_devices, origin
from maxtext_pp_ext.engine.programs.primitives import has, Trait
from maxtext_pp_ext.jax_private import jaxpr_as_fun, JaxprEqn, Literal, Var


class BatchSplit(NamedTuple):
  """An axis of the activations, identified by its size, and the number of parts in which the devices hold it."""

  # number of elements of the axis. If None, no operation is split; only sums that a shard_map does itself are left in
  # parts.
  size: int | None
  parts: int  # number of parts
  fraction: int | None = None  # the number of elements that layers compute at a time; None stands for `size`
  axes: tuple[str, ...] = ()  # the mesh axes over which the devices hold the parts


class Root(NamedTuple):
  """An operation that sums over the batch, at the root of a gradient."""

  eqn: JaxprEqn  # the operation
  # for each part of the split the summed axis in each operand, and the number of parts; None if the operands' first axis
  # already is the axis of parts (see `expose_sums`)
  axes: list[tuple[tuple[int, ...], int]] | None


class Found(NamedTuple):
  """A gradient that is a sum over the batch."""

  roots: list[Root]  # the operations that sum
  tail: list[JaxprEqn]  # the operations that follow the roots, in the program's order, without layout constraints
  factors: list[Var]  # variables that the tail takes in addition to the roots' results
  out: Var  # the result of the tail
  taken: list[JaxprEqn]  # all operations that roots and tail replace

  @property
  def needs(self) -> list[Var | Literal]:
    """What it is computed from: operands of the roots, then factors."""
    return [*(v for root in self.roots for v in root.eqn.invars), *self.factors]

  @property
  def results(self) -> list[Var]:
    """The roots' results."""
    return [root.eqn.outvars[0] for root in self.roots]


def find(
    out: Var | Literal,
    makers: dict[Var, JaxprEqn],
    uses: dict[Var, int],
    split: Sequence[BatchSplit],
    *,
    exact: bool = False,
) -> Found | None:
  """Walks from a gradient back to its roots, through linear operations whose results are used nowhere else.

  Args:
    out: the gradient.
    makers: the result of `jaxprs.makers_of`.
    uses: the result of `jaxprs.count_uses`.
    split: the batch axes to split, each into more than one part.
    exact: whether the axes that a root sums over must have exactly the sizes in `split`.

  Returns:
    None if the gradient has no roots that can be split in this way.
  """
  roots, tail, factors, taken, same, todo = [], [], [], [], {}, [out]
  while todo:
    var = todo.pop()
    eqn = makers.get(var) if isinstance(var, Var) else None
    if eqn is None or uses[var] != 1:
      return None
    root = _root(eqn, makers, split, exact)
    # A quantizer may scale the products of parts of the batch before it adds them up. That sum is not the batch's.
    if root is not None and eqn.primitive.name == "reduce_sum" and root.axes is not None and not exact:
      deeper = find(eqn.invars[0], makers, uses, split, exact=True)
      root = None if deeper is not None and deeper.factors else root
    taken.append(eqn)
    if root is not None:
      roots.append(root)
      continue
    if eqn.primitive.name == "sharding_constraint":  # applies to the whole sum; the parts have their own layout
      same[var] = eqn.invars[0]
      todo.append(eqn.invars[0])
      continue
    linear = _linear_operands(eqn, makers)
    if not linear:
      return None
    tail.append(eqn)
    todo += [v for k, v in enumerate(eqn.invars) if k in linear]
    factors += [v for k, v in enumerate(eqn.invars) if k not in linear and isinstance(v, Var)]

  def original(var):
    return original(same[var]) if isinstance(var, Var) and var in same else var

  tail = [eqn.replace(invars=[original(v) for v in eqn.invars]) for eqn in reversed(tail)]
  return Found(roots, tail, list(dict.fromkeys(factors)), original(out), taken)


def _linear_operands(eqn: JaxprEqn, makers: dict[Var, JaxprEqn]) -> set[int]:
  """The operands in which the operation is jointly linear, if it acts on each part alone; empty if there are none."""
  name = eqn.primitive.name
  if has(eqn, Trait.LINEAR):
    return set(range(len(eqn.invars)))
  # What an operand repeats or converts is smaller than the result if it is a scale, unlike an activation.
  sources = [origin(v, makers, Trait.REPEATS) for v in eqn.invars]
  is_scale = lambda k: sources[k].aval.size < eqn.outvars[0].aval.size
  if name == "mul" and (scales := [k for k in (0, 1) if is_scale(k)]):
    return {1 - scales[0]}
  if name == "div" and is_scale(1):
    return {0}
  if name == "select_n":  # a value or zero
    is_zero = lambda source: isinstance(source, Literal) and source.val == 0
    values = {k for k, source in enumerate(sources) if k and not is_zero(source)}
    return values if len(values) == 1 else set()
  return set()


def _root(eqn: JaxprEqn, makers: dict[Var, JaxprEqn], split: Sequence[BatchSplit], exact: bool) -> Root | None:
  """The operation as a root, or None if it cannot be split in this way."""
  parts = math.prod(s.parts for s in split)
  if eqn.primitive.name == "reduce_sum" and eqn.params["axes"] == (0,):
    maker = makers.get(eqn.invars[0])
    if maker is not None and maker.primitive.name == "shard_map" and eqn.invars[0].aval.shape[0] == parts:
      return Root(eqn, None)
  axes = _split_axes(eqn, split, exact)
  return None if axes is None else Root(eqn, axes)


def _split_axes(eqn: JaxprEqn, split: Sequence[BatchSplit], exact: bool) -> list[tuple[tuple[int, ...], int]] | None:
  """For each `BatchSplit` ((axis of each operand), parts), or None if the operation does not contract all of them.

  The axis is the first contracted one whose size is that of the split or its fraction. If there is none and `exact` is
  False, it is the first contracted one whose size is a multiple: an axis into which the batch was merged as its slower
  part. Axes are distinct.
  """
  axes: list[tuple[int, ...]]
  if eqn.primitive.name == "dot_general":
    (left, right), _ = eqn.params["dimension_numbers"]
    axes = list(zip(left, right, strict=True))
  elif eqn.primitive.name == "reduce_sum":
    axes = [(axis,) for axis in eqn.params["axes"]]
  else:
    return None
  shape = eqn.invars[0].aval.shape
  axes.sort()
  chosen: list[tuple[tuple[int, ...], int]] = []
  for each in split:
    size, parts = each.size, each.parts
    if size is None:
      return None
    unit = each.fraction or size
    free = [a for a in axes if a not in [c for c, _ in chosen]]
    same = [a for a in free if shape[a[0]] in (size, unit)]
    same = same or [a for a in free if shape[a[0]] % unit == 0 and not exact]
    if not same or shape[same[0][0]] % parts:
      return None
    chosen.append((same[0], parts))
  return chosen


def expose_sums(eqn: JaxprEqn, values: list, batch_axes: Sequence[str]) -> list | None:
  """Runs a shard_map, but moves its sums over batch axes out of it, to sums over a leading axis of parts.

  Args:
    eqn: any operation.
    values: the values of its operands.
    batch_axes: the mesh axes that shard the batch.

  Returns:
    The results of the operation; None if it is no shard_map that ends in such a sum.
  """
  sums = _sums_of(eqn, batch_axes)
  if not sums:
    return None
  inner, consts = inner_program(eqn)
  outvars = [sums[k][0] if k in sums else out for k, out in enumerate(inner.outvars)]
  program = jaxpr_as_fun(closed(inner.replace(outvars=outvars), consts))

  def body(*args):
    return tuple(out[None] if k in sums else out for k, out in enumerate(program(*args)))

  out_specs = [P(sums[k][1], *spec) if k in sums else spec for k, spec in enumerate(eqn.params["out_specs"])]
  results = on_devices(eqn, body, eqn.params["in_specs"], out_specs)(*values)
  return [jax.lax.reduce_sum(out, (0,)) if k in sums else out for k, out in enumerate(results)]


def _sums_of(eqn: JaxprEqn, batch_axes: Sequence[str]) -> dict[int, tuple[Var, tuple[str, ...]]]:
  """Outputs of a shard_map that end in a sum over batch axes only: {output: (summed variable, mesh axes)}."""
  if eqn.primitive.name != "shard_map" or not batch_axes:
    return {}
  (inner, _), mesh = inner_program(eqn), eqn.params["mesh"]
  uses, made_by = count_uses(inner), makers_of(inner)
  sums = {}
  for k, out in enumerate(inner.outvars):
    maker = made_by.get(out) if isinstance(out, Var) else None
    if maker is None or uses[out] != 1 or maker.primitive.name != "psum" or maker.params["axis_index_groups"] is not None:
      continue
    axes = {a for a in maker.params["axes"] if mesh.shape[a] > 1}
    if axes and axes <= set(batch_axes):
      sums[k] = (maker.invars[maker.outvars.index(out)], tuple(a for a in batch_axes if a in axes))
  return sums

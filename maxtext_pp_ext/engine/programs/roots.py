# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Where in a backward program a weight's gradient is summed over the batch: its roots, and what follows them.

A root is a matrix product or a sum that contracts the batch, or a sum over devices inside a `shard_map`. From a root to
the gradient there are linear operations only, so that they may as well act on each part of the sum alone.
"""

from __future__ import annotations

from collections.abc import Sequence
import math
from typing import NamedTuple

import jax
from jax.sharding import PartitionSpec as P

from maxtext_pp_ext.engine.programs.jaxprs import count_uses, inner_program, makers_of
from maxtext_pp_ext.jax_private import ClosedJaxpr, jaxpr_as_fun, JaxprEqn, Literal, Var

# Linear, acts on each part alone: may stand between the root and the gradient.
_LINEAR = frozenset(
    {
        "transpose",
        "reshape",
        "convert_element_type",
        "squeeze",
        "broadcast_in_dim",
        "reduce_sum",
        "add_any",
        "neg",
        "copy",
    }
)


class BatchSplit(NamedTuple):
  """An axis of the activations, by its size, and into how many parts the devices hold it.

  Attributes:
    size: how many elements the axis has. Without a size no operation is split; only sums that a shard_map does itself are
      left in parts.
    parts: into how many parts.
    fraction: the size of what layers compute at a time, where that is less than the whole axis.
  """

  size: int | None
  parts: int
  fraction: int | None = None


class Root(NamedTuple):
  """An operation that sums over the batch, at the root of a gradient.

  Attributes:
    eqn: the operation.
    axes: for each part of the split the summed axis in each operand, and the number of parts; None if the operands'
      first axis already is the axis of parts (see `expose_sums`).
  """

  eqn: JaxprEqn
  axes: list[tuple[tuple[int, ...], int]] | None


class Found(NamedTuple):
  """A gradient that is a sum over the batch.

  Attributes:
    roots: the operations that sum.
    tail: those that follow them, in the program's order, without layout constraints.
    factors: variables that the tail takes in addition to the roots' results.
    out: the variable that the tail ends in.
    taken: all operations that roots and tail replace.
  """

  roots: list[Root]
  tail: list[JaxprEqn]
  factors: list[Var]
  out: Var
  taken: list[JaxprEqn]


def find(
    out: Var | Literal,
    makers: dict[Var, JaxprEqn],
    uses: dict[Var, int],
    split: Sequence[BatchSplit],
    *,
    exact: bool = False,
) -> Found | None:
  """Walks from a gradient back to its roots, through linear operations whose results go nowhere else.

  Args:
    out: the gradient.
    makers: as `jaxprs.makers_of` returns them.
    uses: as `jaxprs.count_uses` returns them.
    split: the axes of the batch that are to be split, each into more than one part.
    exact: whether a root may only sum over axes of exactly the size of those.

  Returns:
    None if there are no roots that can be split so.
  """
  roots, tail, factors, taken, same, todo = [], [], [], [], {}, [out]
  while todo:
    var = todo.pop()
    eqn = makers.get(var) if isinstance(var, Var) else None
    if eqn is None or uses[var] != 1:
      return None
    root = _root(eqn, makers, split, exact)
    # A sum over parts of the batch, whose products are scaled part by part (as quantizers do), is not the batch's.
    if root is not None and eqn.primitive.name == "reduce_sum" and root.axes is not None and not exact:
      deeper = find(eqn.invars[0], makers, uses, split, exact=True)
      root = None if deeper is not None and deeper.factors else root
    taken.append(eqn)
    if root is not None:
      roots.append(root)
      continue
    if eqn.primitive.name == "sharding_constraint":  # about the whole sum; the parts have a layout of their own
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
  """The operands that the operation is linear in, jointly, while it acts on each part alone; empty if there are none."""
  name = eqn.primitive.name
  if name in _LINEAR:
    return set(range(len(eqn.invars)))
  if name == "mul":
    scales = [k for k, v in enumerate(eqn.invars) if _source(v, makers).aval.size < eqn.outvars[0].aval.size]
    return {1 - scales[0]} if scales else set()
  if name == "div" and _source(eqn.invars[1], makers).aval.size < eqn.outvars[0].aval.size:
    return {0}
  if name == "select_n":  # a value or zero
    values = [k for k, v in enumerate(eqn.invars[1:], start=1) if not _is_zero(_source(v, makers))]
    return set(values) if len(values) == 1 else set()
  return set()


def _source(var: Var | Literal, makers: dict[Var, JaxprEqn]) -> Var | Literal:
  """What a variable repeats or converts. A scale has fewer elements than what it scales, unlike an activation."""
  while isinstance(var, Var) and var in makers:
    eqn = makers[var]
    if eqn.primitive.name not in ("broadcast_in_dim", "convert_element_type", "reshape", "copy"):
      break
    var = eqn.invars[0]
  return var


def _is_zero(var: Var | Literal) -> bool:
  return isinstance(var, Literal) and var.val == 0


def _root(eqn: JaxprEqn, makers: dict[Var, JaxprEqn], split: Sequence[BatchSplit], exact: bool) -> Root | None:
  """The operation as a root that can be split so, or None."""
  parts = math.prod(s.parts for s in split)
  if eqn.primitive.name == "reduce_sum" and eqn.params["axes"] == (0,):
    maker = makers.get(eqn.invars[0])
    if maker is not None and maker.primitive.name == "shard_map" and eqn.invars[0].aval.shape[0] == parts:
      return Root(eqn, None)
  axes = _split_axes(eqn, split, exact)
  return None if axes is None else Root(eqn, axes)


def _split_axes(eqn: JaxprEqn, split: Sequence[BatchSplit], exact: bool) -> list[tuple[tuple[int, ...], int]] | None:
  """For each part of a split ((axis of each operand), parts), or None if the operation does not contract all of them.

  The axis is the first contracted one of that size or fraction, or else, unless it has to be exact, of a multiple of it:
  an axis that the batch was merged into as its slower part. Axes are distinct.
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
  for size, parts, fraction in split:
    if size is None:
      return None
    unit = fraction or size
    free = [a for a in axes if a not in [c for c, _ in chosen]]
    same = [a for a in free if shape[a[0]] in (size, unit)]
    same = same or [a for a in free if shape[a[0]] % unit == 0 and not exact]
    if not same or shape[same[0][0]] % parts:
      return None
    chosen.append((same[0], parts))
  return chosen


def expose_sums(eqn: JaxprEqn, values: list, batch_axes: Sequence[str]) -> list | None:
  """Runs a shard_map whose sums over batch axes are done outside of it, over a leading axis of parts.

  Args:
    eqn: any operation.
    values: of its operands.
    batch_axes: the mesh axes that shard the batch.

  Returns:
    Its results; None if it is no shard_map that ends in such a sum.
  """
  sums = _sums_of(eqn, batch_axes)
  if not sums:
    return None
  inner, consts = inner_program(eqn)
  outvars = [sums[k][0] if k in sums else out for k, out in enumerate(inner.outvars)]
  program = jaxpr_as_fun(ClosedJaxpr(inner.replace(outvars=outvars), consts))

  def body(*args):
    return tuple(out[None] if k in sums else out for k, out in enumerate(program(*args)))

  results = jax.shard_map(
      body,
      mesh=eqn.params["mesh"],
      in_specs=tuple(eqn.params["in_specs"]),
      out_specs=tuple(P(sums[k][1], *spec) if k in sums else spec for k, spec in enumerate(eqn.params["out_specs"])),
      check_vma=eqn.params["check_vma"],
      axis_names=set(eqn.params.get("newly_manual_axes", eqn.params.get("manual_axes"))),
  )(*values)
  return [jax.lax.reduce_sum(out, (0,)) if k in sums else out for k, out in enumerate(results)]


def _sums_of(eqn: JaxprEqn, batch_axes: Sequence[str]) -> dict[int, tuple[Var, tuple[str, ...]]]:
  """Outputs of a shard_map that end in a sum over batch axes only: {output: (what is summed, mesh axes)}."""
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

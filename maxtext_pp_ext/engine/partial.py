# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Weight gradients as explicit partial sums, so that they cross device boundaries once per repeat.

A weight's gradient is a sum over the batch, which is sharded over the data-like mesh axes. Left to itself the compiler
completes the sum (an all-reduce) wherever the gradient leaves the operation that made it: at every iteration, or, where
it manages to move the reduction out of a loop, at the end of that loop. A partial sum cannot cross a loop's boundary,
because automatic sharding has no layout for "not yet added up".

Here it gets one: a leading axis. The operation at the root of each gradient (a matrix product or a sum that contracts
the batch) is rewritten to contract within each of F equal parts of the batch, with the parts as a leading axis of the
result, sharded over the data-like axes. On each device that is the product it computed anyway, and adding such values up
over iterations and loops needs no communication. What is left to do once is to add up the leading axis.

The rewrite is algebra, true whatever the layouts are: Σ_b = Σ_f Σ_{b in part f}. Layouts decide only how fast it is.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
from jax.extend import core as jex_core
from jax.sharding import PartitionSpec as P
import jax.numpy as jnp
from maxtext_pp_ext.engine.calls import CALLS, inner_program

PyTree = Any

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

  Without a size no operation is split; only sums that a shard_map does itself are left in parts. `fraction` is the size
  of what layers compute at a time, where that is less than the whole axis.
  """

  size: int | None
  parts: int
  fraction: int | None = None


class Root(NamedTuple):
  """An operation that sums over the batch, at the root of a gradient.

  axes: for each part of the split the summed axis in each operand, and the number of parts; None if the operands' first
    axis already is the axis of parts (see `_expose_sums`).
  """

  eqn: Any
  axes: list[tuple[tuple[int, ...], int]] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class GradientProgram:
  """A backward program whose first outputs are weight gradients, taken apart at their roots.

  Attributes:
    body: everything else; (inputs) -> each gradient's operands of roots and factors, then the outputs that have no root.
    roots: for each gradient its roots, or None if it has none that can be split.
    tails: for each gradient with roots what follows them, (results of the roots, factors) -> gradient.
    num_factors: for each gradient how many values its tail takes that do not come from its roots.
    parts: for each gradient F; 1 without roots.
    num_rest: how many outputs have no root.
  """

  body: jex_core.ClosedJaxpr
  roots: tuple[tuple[Root, ...] | None, ...]
  tails: tuple[Any, ...]
  num_factors: tuple[int, ...]
  parts: tuple[int, ...]
  num_rest: int

  @classmethod
  def plan(
      cls, closed: jex_core.ClosedJaxpr, splits: Sequence[Sequence[BatchSplit]], batch_axes: Sequence[str]
  ) -> GradientProgram:
    """Finds the roots of the first `len(splits)` outputs.

    Args:
      closed: the backward program.
      splits: for each gradient the batch axes to split. An empty one, or one that no axis of the root's contraction
        fits, leaves the gradient whole.
      batch_axes: the mesh axes that shard the batch, in the order in which a leading axis of parts is sharded.
    """
    splits = [tuple(s for s in split if s.parts > 1) for split in splits]
    whole = _inline(closed, tuple(batch_axes) if any(splits) else ())
    jaxpr = whole.jaxpr
    uses = _count_uses(jaxpr)
    makers = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    found = [
        _find(out, makers, uses, split) if split else None
        for out, split in zip(jaxpr.outvars[: len(splits)], splits, strict=True)
    ]
    taken = {id(eqn) for one in found if one for eqn in one.taken}
    operands = [v for one in found if one for v in (*(v for root in one.roots for v in root.eqn.invars), *one.factors)]
    rest = [out for k, out in enumerate(jaxpr.outvars) if k >= len(found) or found[k] is None]
    kept = [eqn for eqn in jaxpr.eqns if id(eqn) not in taken]
    return cls(
        body=_sub_program(whole, kept, jaxpr.invars, [*operands, *rest], consts=True),
        roots=tuple(tuple(one.roots) if one else None for one in found),
        tails=tuple(
            _sub_program(
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
      self, args: Sequence[jax.Array], beside: Sequence[PyTree]
  ) -> tuple[list[jax.Array], list[jax.Array], list[PyTree]]:
    """Runs the program.

    Args:
      args: its inputs.
      beside: for each gradient arrays, or None, that are to be computed before it is.

    Returns:
      (gradients, each [F, …] with its own F, other outputs, `beside`).
    """
    values = jex_core.jaxpr_as_fun(self.body)(*args)
    operands, rest = iter(values[: len(values) - self.num_rest]), iter(values[len(values) - self.num_rest :])
    gradients, after = [], []
    for roots, tail, num_factors, before in zip(self.roots, self.tails, self.num_factors, beside, strict=True):
      if roots is None:
        gradients.append(next(rest)[None])
      else:
        results = []
        for root in roots:
          given = [next(operands) for _ in root.eqn.invars]
          # Tied to the smallest operand: what makes a larger one may be part of the same kernel as its product.
          smallest = min(range(len(given)), key=[x.size for x in given].__getitem__)
          given[smallest], before = jax.lax.optimization_barrier((given[smallest], before))
          results.append(_run_root(root, given))
        factors = [next(operands) for _ in range(num_factors)]
        in_axes = (0,) * len(results) + (None,) * num_factors
        gradients += jax.vmap(jex_core.jaxpr_as_fun(tail), in_axes=in_axes)(*results, *factors)
      after.append(before)
    return gradients, list(rest), after


class _Found(NamedTuple):
  roots: list[Root]
  tail: list[Any]  # in program order, without layout constraints
  factors: list[Any]  # variables that the tail takes beside the roots' results
  out: Any  # the variable that the tail ends in
  taken: list[Any]  # every equation that roots and tail replace


def _find(out: Any, makers: dict, uses: dict, split: Sequence[BatchSplit], *, exact: bool = False) -> _Found | None:
  """Walks from a gradient back to its roots, through linear operations whose results go nowhere else."""
  roots, tail, factors, taken, same, todo = [], [], [], [], {}, [out]
  while todo:
    var = todo.pop()
    eqn = makers.get(var) if isinstance(var, jex_core.Var) else None
    if eqn is None or uses[var] != 1:
      return None
    root = _root(eqn, makers, split, exact)
    # A sum over parts of the batch, whose products are scaled part by part (as quantizers do), is not the batch's.
    if root is not None and eqn.primitive.name == "reduce_sum" and root.axes is not None and not exact:
      deeper = _find(eqn.invars[0], makers, uses, split, exact=True)
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
    factors += [v for k, v in enumerate(eqn.invars) if k not in linear and isinstance(v, jex_core.Var)]

  def original(var):
    return original(same[var]) if isinstance(var, jex_core.Var) and var in same else var

  tail = [eqn.replace(invars=[original(v) for v in eqn.invars]) for eqn in reversed(tail)]
  return _Found(roots, tail, list(dict.fromkeys(factors)), original(out), taken)


def _linear_operands(eqn: Any, makers: dict) -> set[int]:
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


def _source(var: Any, makers: dict) -> Any:
  """What a variable repeats or converts. A scale has fewer elements than what it scales, unlike an activation."""
  while isinstance(var, jex_core.Var) and var in makers:
    eqn = makers[var]
    if eqn.primitive.name not in ("broadcast_in_dim", "convert_element_type", "reshape", "copy"):
      break
    var = eqn.invars[0]
  return var


def _is_zero(var: Any) -> bool:
  return isinstance(var, jex_core.Literal) and var.val == 0


def _root(eqn: Any, makers: dict, split: Sequence[BatchSplit], exact: bool) -> Root | None:
  """The operation as a root that can be split so, or None."""
  parts = math.prod(s.parts for s in split)
  if eqn.primitive.name == "reduce_sum" and eqn.params["axes"] == (0,):
    maker = makers.get(eqn.invars[0])
    if maker is not None and maker.primitive.name == "shard_map" and eqn.invars[0].aval.shape[0] == parts:
      return Root(eqn, None)
  axes = _split_axes(eqn, split, exact)
  return None if axes is None else Root(eqn, axes)


def _split_axes(eqn: Any, split: Sequence[BatchSplit], exact: bool) -> list[tuple[tuple[int, ...], int]] | None:
  """For each part of a split ((axis of each operand), parts), or None if the operation does not contract all of them.

  The axis is the first contracted one of that size or fraction, or else, unless it has to be exact, of a multiple of it:
  an axis that the batch was merged into as its slower part. Axes are distinct.
  """
  if eqn.primitive.name == "dot_general":
    (left, right), _ = eqn.params["dimension_numbers"]
    axes = list(zip(left, right, strict=True))
  elif eqn.primitive.name == "reduce_sum":
    axes = [(axis,) for axis in eqn.params["axes"]]
  else:
    return None
  shape = eqn.invars[0].aval.shape
  axes.sort()
  chosen = []
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


def _count_uses(jaxpr: Any) -> dict:
  uses: dict = {}
  for var in [v for eqn in jaxpr.eqns for v in eqn.invars] + list(jaxpr.outvars):
    if isinstance(var, jex_core.Var):
      uses[var] = uses.get(var, 0) + 1
  return uses


def _sub_program(closed: jex_core.ClosedJaxpr, eqns: list, invars: Sequence, outvars: Sequence, *, consts: bool):
  """A program of these equations only, with the constants of the whole or with none."""
  given = {} if consts else {"constvars": []}
  jaxpr = closed.jaxpr.replace(eqns=eqns, invars=list(invars), outvars=list(outvars), **given)
  return jex_core.ClosedJaxpr(jaxpr, closed.consts if consts else [])


def _inline(closed: jex_core.ClosedJaxpr, batch_axes: tuple[str, ...]) -> Any:
  """The same program without calls, and with sums over batch axes outside of shard_maps."""
  run = functools.partial(_run_inlined, closed.jaxpr, closed.consts, batch_axes)
  return jax.make_jaxpr(run)(*closed.in_avals)


def _run_inlined(jaxpr: Any, consts: Sequence, batch_axes: tuple[str, ...], *args: Any) -> list:
  env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
  read = lambda v: v.val if isinstance(v, jex_core.Literal) else env[v]
  for eqn in jaxpr.eqns:
    values = [read(v) for v in eqn.invars]
    sums = _sums_of(eqn, batch_axes)
    if sums:
      results = _expose_sums(eqn, values, sums)
    elif eqn.primitive.name in CALLS and not _has_shardings(eqn):
      inner, inner_consts = inner_program(eqn)
      results = _run_inlined(inner, inner_consts, batch_axes, *_keep_from_merging(eqn, values))
    else:
      variables = list(dict.fromkeys(v for v in eqn.invars if isinstance(v, jex_core.Var)))
      single = jaxpr.replace(constvars=[], eqns=[eqn], invars=variables, outvars=list(eqn.outvars))
      results = jex_core.jaxpr_as_fun(jex_core.ClosedJaxpr(single, []))(*(env[v] for v in variables))
    env.update(zip(eqn.outvars, results, strict=True))
  return [read(v) for v in jaxpr.outvars]


def _sums_of(eqn: Any, batch_axes: tuple[str, ...]) -> dict[int, tuple[Any, tuple[str, ...]]]:
  """Outputs of a shard_map that end in a sum over batch axes only: {output: (what is summed, mesh axes)}."""
  if eqn.primitive.name != "shard_map" or not batch_axes:
    return {}
  (inner, _), mesh = inner_program(eqn), eqn.params["mesh"]
  uses = _count_uses(inner)
  makers = {v: e for e in inner.eqns for v in e.outvars}
  sums = {}
  for k, out in enumerate(inner.outvars):
    maker = makers.get(out) if isinstance(out, jex_core.Var) else None
    if maker is None or uses[out] != 1 or maker.primitive.name != "psum" or maker.params["axis_index_groups"] is not None:
      continue
    axes = {a for a in maker.params["axes"] if mesh.shape[a] > 1}
    if axes and axes <= set(batch_axes):
      sums[k] = (maker.invars[maker.outvars.index(out)], tuple(a for a in batch_axes if a in axes))
  return sums


def _expose_sums(eqn: Any, values: list, sums: dict[int, tuple[Any, tuple[str, ...]]]) -> list:
  """Runs a shard_map whose sums over batch axes are done outside of it, over a leading axis of parts."""
  inner, consts = inner_program(eqn)
  outvars = [sums[k][0] if k in sums else out for k, out in enumerate(inner.outvars)]
  program = jex_core.jaxpr_as_fun(jex_core.ClosedJaxpr(inner.replace(outvars=outvars), consts))

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


def _has_shardings(eqn: Any) -> bool:
  """Whether a call lays its operands or results out; then it is left alone."""
  given = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
  return any(isinstance(s, jax.sharding.Sharding) for s in given)


def _keep_from_merging(eqn: Any, values: list) -> list:
  """What lowering a rematerialised call does: a barrier, or the compiler would merge it with the forward pass."""
  prevent = eqn.params.get("prevent_cse", False) if eqn.params.get("differentiated", False) else False
  flags = [prevent] * len(values) if isinstance(prevent, bool) else list(prevent)
  if not any(flags):
    return values
  behind = iter(jax.lax.optimization_barrier([v for v, f in zip(values, flags, strict=False) if f]))
  return [next(behind) if f else v for v, f in zip(values, flags, strict=False)]

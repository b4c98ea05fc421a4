# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""How the operations of a program read and write arrays fastest: in which memory layout, and where."""

from collections.abc import Iterator, Mapping, Sequence

import jax

from maxtext_pp_ext.engine.programs.jaxprs import inner_program, makers_of, uses
from maxtext_pp_ext.engine.programs.primitives import has, is_call, runs_program, Trait
from maxtext_pp_ext.hardware import tiles
from maxtext_pp_ext.jax_private import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var


def orders(closed: ClosedJaxpr, count: int, matrix_unit: int | None) -> tuple[tuple[int, ...], ...]:
  """For each of the first `count` inputs, its dimensions from major to minor as the products want them.

  `matrix_unit` is the number of columns of a matrix unit; with None no weight is taken to fill one.

  The TPU compiler (libtpu 0.0.48.1; benchmarks.workarounds order_of_weight) reads a weight [embed, heads, head_dim] as
  one matrix per head. If memory has it in another order, it copies the weight before each product. A weight [heads,
  head_dim, embed] in its own order takes twice as long, where a matrix unit has more columns than head_dim (libtpu
  0.0.48.1; benchmarks.workarounds order_of_output_projection). So both are in the order heads, embed, head_dim, behind
  the product's batch. In general, one side of a product (what it contracts, or what it keeps) has several dimensions. All
  of these but the last come first, then the other side's, then the last one.

  A weight is in its own order if it has one dimension on each side, if no product reads it, or if several read it in
  different ways. So is one whose last contracted dimension fills a matrix unit: it is read as fast, and products write
  its gradient in this order.
  """
  found = []
  for var in closed.jaxpr.invars[:count]:
    read = uses(closed.jaxpr, var, through=lambda eqn, _: has(eqn, Trait.SAME_DIMENSIONS))
    wanted = {order for eqn, at in read if (order := _by_product(eqn, at, matrix_unit)) is not None}
    found.append(_only_order(wanted, var))
  return tuple(found)


def _only_order(wanted: set[tuple[int, ...]], var: Var) -> tuple[int, ...]:
  """The order that is wanted; that of the variable's own dimensions if there is none, or several."""
  own = tuple(range(len(var.aval.shape)))
  return next(iter(wanted)) if len(wanted) == 1 else own


def of_kernels(jaxpr: Jaxpr, outs: Sequence[int]) -> tuple[bool, ...]:
  """For each of these outputs of a program, whether a kernel returns it. It is in the kernel's order then."""
  return tuple(_is_of_kernel(jaxpr, jaxpr.outvars[k]) for k in outs)


def _is_of_kernel(jaxpr: Jaxpr, var: Var | Literal) -> bool:
  eqn = makers_of(jaxpr).get(var) if isinstance(var, Var) else None
  if eqn is None:
    return False
  if is_call(eqn):
    inner, _ = inner_program(eqn)
    return _is_of_kernel(inner, inner.outvars[eqn.outvars.index(var)])
  if has(eqn, Trait.SAME_DIMENSIONS):
    return _is_of_kernel(jaxpr, eqn.invars[0])
  return eqn.primitive.name in ("pallas_call", "shard_map")


def parts_of_kernels(jaxpr: Jaxpr) -> set[Var]:
  """The variables that are one lane of what kernels return, such as attention's logsumexp, which fills all lanes there.

  The TPU compiler (libtpu 0.0.48.1; benchmarks.workarounds part_of_kernel) cuts them out anew for each order in which
  other kernels read them.
  """
  found, makers = set[Var](), makers_of(jaxpr)
  for eqn in jaxpr.eqns:
    if eqn.primitive.name == "slice" or runs_program(eqn):
      found |= {var for var in eqn.outvars if _is_part_of_kernel(makers, var)}
  return found


def _is_part_of_kernel(makers: Mapping[Var, JaxprEqn], var: Var | Literal, *, is_cut: bool = False) -> bool:
  """Whether a variable is cut out of what a kernel returns; `is_cut` says whether it has been cut on the way here."""
  eqn = makers.get(var) if isinstance(var, Var) else None
  if eqn is None:
    return False
  if runs_program(eqn):
    inner, _ = inner_program(eqn)
    return _is_part_of_kernel(makers_of(inner), inner.outvars[eqn.outvars.index(var)], is_cut=is_cut)
  cuts = eqn.primitive.name == "slice" and eqn.invars[0].aval.size >= tiles.LANES * eqn.outvars[0].aval.size
  if cuts or _keeps_elements(eqn):
    return _is_part_of_kernel(makers, eqn.invars[0], is_cut=is_cut or cuts)
  return is_cut and eqn.primitive.name == "pallas_call"


def of_products(jaxpr: Jaxpr, outs: Sequence[int]) -> tuple[bool, ...]:
  """For each of these outputs of a program, whether a product computes it and what reads it can read it in a buffer.

  That is, others compute with it. Kernels and loops would get a copy.
  """
  return tuple(_is_of_product(jaxpr, jaxpr.outvars[k]) for k in outs)


def _is_of_product(jaxpr: Jaxpr, var: Var | Literal) -> bool:
  if not isinstance(var, Var) or var.aval.memory_space != jax.memory.Space.Device:
    return False
  makers, source = makers_of(jaxpr), var
  while source in makers and _keeps_elements(makers[source]) and isinstance(makers[source].invars[0], Var):
    source = makers[source].invars[0]
  if source not in makers or makers[source].primitive.name != "dot_general":
    return False
  readers = [eqn for eqn, _ in uses(jaxpr, var, through=lambda eqn, _: _keeps_elements(eqn)) if eqn is not None]
  return bool(readers) and all(eqn.primitive.name == "dot_general" or not has(eqn, Trait.LONG) for eqn in readers)


def _keeps_elements(eqn: JaxprEqn) -> bool:
  """Whether an operation's result has its only operand's elements, rounded perhaps."""
  if len(eqn.invars) != 1:
    return False
  if eqn.primitive.name == "broadcast_in_dim":
    return eqn.invars[0].aval.size == eqn.outvars[0].aval.size
  return eqn.primitive.name == "reduce_precision" or has(eqn, Trait.RESHAPES) or has(eqn, Trait.SAME_DIMENSIONS)


def residual_orders(jaxpr: Jaxpr, first: int, count: int) -> tuple[tuple[int, ...], ...]:
  """For each of `count` inputs of backward from `first` on, its dimensions from major to minor as backward reads them.

  Attention kernels read queries, keys and values with heads before the sequence, or with the sequence last. An input that
  is read in one order only is in that order, and every other input is in its own.
  """
  orders_of = lambda var: set(_orders_of_readers(jaxpr, var, tuple(range(len(var.aval.shape)))))
  return tuple(_only_order(orders_of(var), var) for var in jaxpr.invars[first : first + count])


def _orders_of_readers(jaxpr: Jaxpr, var: Var | Literal, order: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
  """For each operation that reads a variable, behind transposes or not, the order in which it reads the dimensions.

  `order` is that of the variable itself.
  """
  for eqn in jaxpr.eqns:
    for at in (k for k, operand in enumerate(eqn.invars) if operand is var):
      if has(eqn, Trait.SAME_DIMENSIONS):
        yield from _orders_of_readers(jaxpr, eqn.outvars[min(at, len(eqn.outvars) - 1)], order)
      elif eqn.primitive.name == "transpose":
        yield from _orders_of_readers(jaxpr, eqn.outvars[0], tuple(order[dim] for dim in eqn.params["permutation"]))
      elif runs_program(eqn):
        inner, _ = inner_program(eqn)
        yield from _orders_of_readers(inner, inner.invars[at], order)
      else:
        yield order
  if var in jaxpr.outvars:
    yield order


def _by_product(eqn: JaxprEqn | None, at: int, matrix_unit: int | None) -> tuple[int, ...] | None:
  """The order in which an operation wants an operand; None is any."""
  if eqn is None:
    return None
  shape = eqn.invars[at].aval.shape
  own = tuple(range(len(shape)))
  if eqn.primitive.name != "dot_general":
    return own
  contracted, batch = (sorted(each[at]) for each in eqn.params["dimension_numbers"])
  kept = [dim for dim in own if dim not in (*contracted, *batch)]
  several, others = (kept, contracted) if len(kept) > 1 else (contracted, kept)
  if len(several) < 2 or not others or (several is contracted and matrix_unit and shape[several[-1]] >= matrix_unit):
    return own
  return (*batch, *several[:-1], *others, several[-1])

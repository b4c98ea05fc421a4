# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""In which memory layout the matrix products of a program read their weights fastest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from maxtext_pp_ext.engine.programs.jaxprs import CALLS, inner_program
from maxtext_pp_ext.jax_private import ClosedJaxpr, Jaxpr, JaxprEqn, Var

# Operations after which an array's dimensions are what they were before.
_SAME_DIMENSIONS = frozenset({"convert_element_type", "copy", "optimization_barrier", "sharding_constraint"})


def orders(closed: ClosedJaxpr, count: int) -> tuple[tuple[int, ...], ...]:
  """For each of the first `count` inputs, its dimensions from major to minor as the products want them.

  The TPU compiler (libtpu 0.0.48.1) reads a weight [embed, heads, head_dim] as one matrix per head. If memory has it in
  another order, it copies the weight before each product. So the order is: the batch of the product, all dimensions of
  the result but the last, those that are contracted, the last of the result. A weight with one dimension of the result
  is in that order already, and so is one that no product reads, or several read in different ways.
  """
  found = []
  for var in closed.jaxpr.invars[:count]:
    wanted = set(_wanted(closed.jaxpr, var))
    found.append(wanted.pop() if len(wanted) == 1 else tuple(range(len(var.aval.shape))))
  return tuple(found)


def _wanted(jaxpr: Jaxpr, var: Var) -> Iterator[tuple[int, ...]]:
  """The order that each use of a variable wants."""
  for eqn in jaxpr.eqns:
    for at, operand in enumerate(eqn.invars):
      if operand is not var:
        continue
      if eqn.primitive.name == "dot_general":
        yield _of_product(eqn, at)
      elif eqn.primitive.name in CALLS:
        inner, _ = inner_program(eqn)
        yield from _wanted(inner, inner.invars[at])
      elif eqn.primitive.name in _SAME_DIMENSIONS:
        yield from _wanted(jaxpr, eqn.outvars[at])
      else:
        yield tuple(range(len(var.aval.shape)))


def _of_product(eqn: JaxprEqn, at: int) -> tuple[int, ...]:
  contracted, batch = (each[at] for each in eqn.params["dimension_numbers"])
  dims: Sequence[int] = range(len(eqn.invars[at].aval.shape))
  kept = [dim for dim in dims if dim not in (*contracted, *batch)]
  follow = max(contracted, default=-1) < min(kept, default=len(dims))
  if len(kept) < 2 or not contracted or not follow:
    return tuple(dims)
  return (*batch, *kept[:-1], *contracted, kept[-1])

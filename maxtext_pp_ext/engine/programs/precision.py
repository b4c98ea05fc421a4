# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Finds the dtype in which a weight can be gathered without changing a single bit of the result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from maxtext_pp_ext.engine.programs.jaxprs import CALLS, inner_program
from maxtext_pp_ext.jax_private import Jaxpr, JaxprEqn, Literal, Var

# Operations that move or lay out elements without computing with them, so they commute with a cast.
_MOVES = frozenset(
    {
        "sharding_constraint",
        "reshard",
        "reshape",
        "transpose",
        "squeeze",
        "expand_dims",
        "broadcast_in_dim",
        "slice",
        "copy",
    }
)


class _UsedOtherwise(Exception):
  """A weight is used in its own dtype."""


def cast_on_first_use(fn: Callable, weights: list[Any], *args: Any) -> list[jnp.dtype | None]:
  """For each weight the one dtype that `fn` casts it to before any arithmetic, or None.

  If every use of a weight in `fn(weights, *args)` begins with the same cast, then casting it earlier (before it is
  gathered) gives bit-identical results. Only casts to a narrower dtype count.

  Args:
    fn: a stage. It is traced, so its Python side effects happen.
    weights: arrays or shape-dtype structs.
    *args: further arguments.
  """
  closed = jax.make_jaxpr(lambda ws: fn(ws, *args))(weights)
  return [_narrower(closed.jaxpr, var) for var in closed.jaxpr.invars[: len(weights)]]


def _narrower(jaxpr: Jaxpr, var: Var) -> jnp.dtype | None:
  try:
    dtypes = _casts(jaxpr, var)
  except _UsedOtherwise:
    return None
  if len(dtypes) != 1:
    return None
  (dtype,) = dtypes
  is_cast = jnp.issubdtype(dtype, jnp.floating) and jnp.issubdtype(var.aval.dtype, jnp.floating)
  return dtype if is_cast and dtype.itemsize < var.aval.dtype.itemsize else None


def _casts(jaxpr: Jaxpr, var: Var) -> set[jnp.dtype]:
  """The dtypes that a variable is cast to; raises `_UsedOtherwise` if it is used in any other way."""
  if any(v is var for v in jaxpr.outvars):
    raise _UsedOtherwise
  dtypes = set()
  for eqn in jaxpr.eqns:
    for position in (i for i, v in enumerate(eqn.invars) if v is var):
      dtypes |= _casts_of_use(jaxpr, eqn, position)
  return dtypes


def _casts_of_use(jaxpr: Jaxpr, eqn: JaxprEqn, position: int) -> set[jnp.dtype]:
  name = eqn.primitive.name
  if name == "convert_element_type":
    return {jnp.dtype(eqn.params["new_dtype"])}
  if name in _MOVES or (name == "dynamic_slice" and position == 0):
    return _casts(jaxpr, eqn.outvars[0])
  if name in CALLS or name == "scan":
    inner, _ = inner_program(eqn)
    if name in CALLS or _is_scanned_over(eqn.invars[position], inner.invars[position]):
      return _casts(inner, inner.invars[position])
  raise _UsedOtherwise


def _is_scanned_over(outer: Var | Literal, inner: Var) -> bool:
  """Whether a loop reads one slice of this operand per iteration; constants and carries keep their shape."""
  return outer.aval.shape[1:] == inner.aval.shape and outer.aval.ndim == inner.aval.ndim + 1

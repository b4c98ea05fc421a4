# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Finds the dtype in which a weight can be gathered without changing a single bit of the result."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from maxtext_pp_ext.engine.programs.jaxprs import inner_program, uses
from maxtext_pp_ext.engine.programs.primitives import has, is_call, Trait
from maxtext_pp_ext.jax_private import Jaxpr, JaxprEqn, Var


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
  """The one narrower dtype that each use of a variable casts it to; None if it is used in any other way."""
  dtypes = set()
  moves = lambda eqn, at: has(eqn, Trait.MOVES) or (eqn.primitive.name == "dynamic_slice" and at == 0)
  for eqn, _ in uses(jaxpr, var, through=moves, enter=_reads_as_given):
    if eqn is None or eqn.primitive.name != "convert_element_type":
      return None
    dtypes.add(jnp.dtype(eqn.params["new_dtype"]))
  if len(dtypes) != 1:
    return None
  (dtype,) = dtypes
  is_cast = jnp.issubdtype(dtype, jnp.floating) and jnp.issubdtype(var.aval.dtype, jnp.floating)
  return dtype if is_cast and dtype.itemsize < var.aval.dtype.itemsize else None


def _reads_as_given(eqn: JaxprEqn, at: int) -> bool:
  """Whether an inner program gets an operand, or one slice of it per iteration; constants and carries of loops do not."""
  if eqn.primitive.name != "scan":
    return is_call(eqn)
  outer, inner = eqn.invars[at].aval, inner_program(eqn)[0].invars[at].aval
  return outer.shape[1:] == inner.shape and outer.ndim == inner.ndim + 1

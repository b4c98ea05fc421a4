# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Residuals that a remat policy moves to the host's memory, with their dimensions there in the order that backward reads.

The compiler fetches an iteration's residuals one iteration ahead, and its loops carry them in the order of their own
dimensions (libtpu 0.0.48.1; benchmarks.workarounds order_of_offloaded). Stored in another order, each is copied twice:
0.13 s of a step of Llama 3.1 8B on v6e with five tensors offloaded, 3.4 %. So here the array itself is transposed before
it leaves, and after it is back, which moves nothing.
"""

from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp

from maxtext_pp_ext.engine.programs.jaxprs import count_uses, inline, interpret, makers_of
from maxtext_pp_ext.engine.transfers.memory_order import in_memory
from maxtext_pp_ext.jax_private import ClosedJaxpr, JaxprEqn, Var


def in_orders(
    forward: ClosedJaxpr, backward: ClosedJaxpr, orders: Mapping[tuple[int, int], Sequence[int]]
) -> tuple[ClosedJaxpr, ClosedJaxpr]:
  """The same programs, whose arrays in the host's memory have their dimensions in other orders.

  Args:
    forward: a program that moves some of its outputs to the host's memory.
    backward: a program that moves some of its inputs to the device's memory.
    orders: (number of forward's output, number of backward's input) -> the order of its dimensions in the host's memory.
      Arrays that are moved elsewhere, such as in a `shard_map`, stay as they are.
  """
  backward = inline(backward, lambda *_: None)
  leaves = {k: eqn for k, _ in orders if (eqn := _leaving(forward, k)) is not None}
  found = {pair: order for pair, order in orders.items() if pair[0] in leaves and _only_fetched(backward, pair[1])}
  if not found:
    return forward, backward
  leaving = {id(leaves[k]): order for (k, _), order in found.items()}
  fetched = {backward.jaxpr.invars[k]: order for (_, k), order in found.items()}

  def leave(eqn: JaxprEqn, values: list) -> list | None:
    if id(eqn) not in leaving:
      return None
    order = leaving[id(eqn)]
    return eqn.primitive.bind(jnp.transpose(in_memory(values[0], order), order), **eqn.params)

  def fetch(eqn: JaxprEqn, values: list) -> list | None:
    order = next((fetched[v] for v in eqn.invars if isinstance(v, Var) and v in fetched), None)
    if order is None:
      return None
    (x,) = eqn.primitive.bind(*values, **eqn.params)
    return [jnp.transpose(in_memory(x, range(x.ndim)), sorted(range(x.ndim), key=order.__getitem__))]

  in_avals = [
      v.aval if v not in fetched else v.aval.update(shape=tuple(v.aval.shape[dim] for dim in fetched[v]))
      for v in backward.jaxpr.invars
  ]
  return _by(forward, leave, forward.in_avals), _by(backward, fetch, in_avals)


def _by(program: ClosedJaxpr, rule: Callable, in_avals: Sequence) -> ClosedJaxpr:
  return jax.make_jaxpr(lambda *args: interpret(program.jaxpr, program.consts, args, rule))(*in_avals)


def _leaving(program: ClosedJaxpr, out: int) -> JaxprEqn | None:
  """The operation that moves an output to the host's memory; None if there is none here, or something reads it there."""
  var = program.jaxpr.outvars[out]
  eqn = makers_of(program.jaxpr).get(var)
  return eqn if eqn is not None and _moves_one(eqn) and count_uses(program.jaxpr)[var] == 1 else None


def _only_fetched(program: ClosedJaxpr, number: int) -> bool:
  """Whether an input is moved to the device's memory, and nothing else reads it."""
  var = program.jaxpr.invars[number]
  readers = [eqn for eqn in program.jaxpr.eqns if _moves_one(eqn) and eqn.invars[0] is var]
  return count_uses(program.jaxpr)[var] == len(readers) > 0


def _moves_one(eqn: JaxprEqn) -> bool:
  return eqn.primitive.name == "device_put" and len(eqn.invars) == 1

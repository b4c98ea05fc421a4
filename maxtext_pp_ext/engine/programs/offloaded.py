# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Residuals that a remat policy moves to the host's memory, with their dimensions there in the order that backward reads.

Loops carry what is fetched one iteration ahead, in the order of its own dimensions (libtpu 0.0.48.1;
benchmarks.workarounds order_of_offloaded). Stored in another order, each array is copied twice.
So here the array itself is transposed before it leaves, and transposed back when it has returned. Both only rename
dimensions, since the memory has this order already.

Forward itself leaves the array on the device. The next iteration sends it, and backward gets what the iteration before
has fetched (`engine/host_memory.py`).
"""

import collections
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp

from maxtext_pp_ext.engine.programs.jaxprs import count_uses, inline, interpret, variables
from maxtext_pp_ext.engine.transfers.memory_order import in_memory
from maxtext_pp_ext.jax_private import ClosedJaxpr, JaxprEqn, Var


def in_orders(
    forward: ClosedJaxpr, backward: ClosedJaxpr, orders: Mapping[tuple[int, int], Sequence[int]]
) -> tuple[ClosedJaxpr, ClosedJaxpr, set[int]]:
  """The same programs, whose arrays in the host's memory have their dimensions in these orders, before they are sent.

  Args:
    forward: a program that moves some of its outputs to the host's memory.
    backward: a program that moves some of its inputs to the device's memory.
    orders: (number of forward's output, number of backward's input) -> the order of its dimensions in the host's memory.
      Arrays that are moved elsewhere, such as in a `shard_map`, stay as they are. So do those that something reads in the
      host's memory.

  Returns:
    (forward, backward, the numbers of forward's outputs that are on the device now).
  """
  backward = inline(backward, lambda *_: None)
  used, read = count_uses(forward.jaxpr), count_uses(backward.jaxpr)
  left = {eqn.outvars[0] for eqn in _moves(forward)}
  fetches = collections.Counter(v for eqn in _moves(backward) for v in variables(eqn.invars))
  leaving, fetched, outs = dict[Var, Sequence[int]](), dict[Var, Sequence[int]](), set[int]()
  for (out, number), order in orders.items():
    there, here = forward.jaxpr.outvars[out], backward.jaxpr.invars[number]
    if there in left and used[there] == 1 and 0 < fetches[here] == read[here]:
      leaving[there] = fetched[here] = order
      outs.add(out)
  if not leaving:
    return forward, backward, outs

  def leave(eqn: JaxprEqn, values: list) -> list | None:
    if leaving.keys().isdisjoint(eqn.outvars):
      return None
    order = leaving[eqn.outvars[0]]
    return [jnp.transpose(in_memory(values[0], order), order)]

  def fetch(eqn: JaxprEqn, values: list) -> list | None:
    if fetched.keys().isdisjoint(variables(eqn.invars)):
      return None
    (x,), order = eqn.primitive.bind(*values, **eqn.params), fetched[eqn.invars[0]]
    return [jnp.transpose(in_memory(x, range(x.ndim)), sorted(range(x.ndim), key=order.__getitem__))]

  in_avals = [
      v.aval if v not in fetched else v.aval.update(shape=tuple(v.aval.shape[dim] for dim in fetched[v]))
      for v in backward.jaxpr.invars
  ]
  return _by(forward, leave, forward.in_avals), _by(backward, fetch, in_avals), outs


def _moves(program: ClosedJaxpr) -> list[JaxprEqn]:
  """The operations that move one array each to another memory."""
  return [eqn for eqn in program.jaxpr.eqns if eqn.primitive.name == "device_put" and len(eqn.invars) == 1]


def _by(program: ClosedJaxpr, rule: Callable, in_avals: Sequence) -> ClosedJaxpr:
  """The program that runs another one by a rule, on inputs of these types."""
  return jax.make_jaxpr(lambda *args: interpret(program.jaxpr, program.consts, args, rule))(*in_avals)

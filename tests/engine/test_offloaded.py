# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Arrays in the host's memory have their dimensions in the order that backward reads, and the same values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_pp_ext.engine.programs import offloaded
from maxtext_pp_ext.engine.programs.jaxprs import closed
from maxtext_pp_ext.jax_private import jaxpr_as_fun

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
X = np.arange(2 * 3 * 4 * 5, dtype=np.float32).reshape(2, 3, 4, 5)
ORDER = (0, 2, 3, 1)


def forward(x):
  y = jnp.sin(x)
  return y.sum(), jax.device_put(y, HOST)


def backward(kept, scale):
  return jax.device_put(kept, DEVICE) * scale + 1


def in_a_call(kept, scale):
  return jax.checkpoint(backward)(kept, scale)


def reads_twice(kept, scale):
  return jax.device_put(kept, DEVICE) * scale, kept


def programs(back=backward):
  first = jax.make_jaxpr(forward)(X)
  return first, jax.make_jaxpr(back)(*(jax.ShapeDtypeStruct(v.shape, v.dtype) for v in first.out_avals[1:]), 2.0)


def on_host(program, number):
  """The same program, whose input of this number is in the host's memory."""
  avals = [v.aval for v in program.jaxpr.invars]
  avals[number] = avals[number].update(memory_space=HOST)
  return jax.make_jaxpr(jaxpr_as_fun(program))(*avals)


@pytest.mark.parametrize("back", [backward, in_a_call])
def test_what_is_kept_has_another_order_and_the_same_values(back):
  first, second = programs(back)
  forth, fetched, to_send = offloaded.in_orders(first, on_host(second, 0), {(1, 0): ORDER})
  assert forth.out_avals[1].shape == (2, 4, 5, 3) and forth.out_avals[1].memory_space == DEVICE and to_send == {1}
  assert fetched.in_avals[0].shape == (2, 4, 5, 3) and fetched.in_avals[0].memory_space == HOST
  run = lambda x, there, back: jaxpr_as_fun(back)(jax.device_put(jaxpr_as_fun(there)(x)[1], HOST), jnp.float32(2.0))
  expected = 2 * np.sin(X) + 1
  np.testing.assert_allclose(jax.jit(lambda x: run(x, forth, fetched))(X)[0], expected, rtol=1e-5)
  on_its_way = jax.jit(lambda x: jaxpr_as_fun(forth)(x)[1])(X)
  np.testing.assert_allclose(np.asarray(on_its_way), np.sin(X).transpose(ORDER), rtol=1e-5)


def test_what_something_else_reads_stays_as_it_is():
  first, second = programs(reads_twice)
  forth, fetched, to_send = offloaded.in_orders(first, on_host(second, 0), {(1, 0): ORDER})
  assert forth.out_avals[1].shape == fetched.in_avals[0].shape == X.shape and not to_send


def test_what_forward_itself_fetches_stays_as_it_is():
  reads = lambda x: (jax.device_put(there := jax.device_put(x, HOST), DEVICE).sum(), there)
  _, second = programs()
  forth, fetched, to_send = offloaded.in_orders(jax.make_jaxpr(reads)(X), on_host(second, 0), {(1, 0): ORDER})
  assert forth.out_avals[1].shape == fetched.in_avals[0].shape == X.shape and not to_send


def test_what_no_operation_of_the_program_itself_moves_stays_as_it_is():
  first, second = programs()
  (given,) = (eqn.invars[0] for eqn in first.jaxpr.eqns if eqn.primitive.name == "device_put")
  # Here it comes from elsewhere.
  without = closed(first.jaxpr.replace(outvars=[first.jaxpr.outvars[0], given]), first.consts)
  forth, fetched, to_send = offloaded.in_orders(without, on_host(second, 0), {(1, 0): ORDER})
  assert forth.out_avals[1].shape == fetched.in_avals[0].shape == X.shape and not to_send

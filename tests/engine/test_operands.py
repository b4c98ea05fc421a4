# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The memory layout in which a program's operations read its weights and residuals."""

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
import jax.numpy as jnp
import pytest

from maxtext_pp_ext.engine.programs import operands

HEADS = (2, 8, 4, 16)  # stages, embed, heads, head_dim
ONE_MATRIX_PER_HEAD, ROW_MAJOR = (0, 2, 1, 3), (0, 1, 2, 3)


def of_stages(equation):
  return jax.vmap(lambda w, x: jnp.einsum(equation, x, w))


@pytest.mark.parametrize(
    ("fn", "order"),
    [
        (of_stages("re,ehd->rhd"), ONE_MATRIX_PER_HEAD),
        (jax.checkpoint(lambda w, x: jax.jit(of_stages("re,ehd->rhd"))(w.astype(jnp.bfloat16), x)), ONE_MATRIX_PER_HEAD),
        (lambda w, x: of_stages("reh,ehd->rd")(w, jnp.zeros((2, 3, 8, 4))), (0, 1, 3, 2)),
        (lambda w, x: of_stages("reh,ehd->rd")(w[:, :, :1], jnp.zeros((2, 3, 8, 1))), ROW_MAJOR),
        (lambda w, x: w * 2 + x.sum(), ROW_MAJOR),
        (lambda w, x: of_stages("re,ehd->rhd")(w, x).sum() + w.sum(), ROW_MAJOR),
        (lambda w, x: x, ROW_MAJOR),
    ],
    ids=[
        "heads",
        "heads, within calls and cast",
        "output projection",
        "a part of it",
        "no product",
        "a product and a sum",
        "unused",
    ],
)
def test_the_order_in_memory_is_the_one_that_the_products_want(fn, order):
  closed = jax.make_jaxpr(fn)(jnp.zeros(HEADS), jnp.zeros((2, 3, 8)))
  for matrix_unit in (None, 32):
    assert operands.orders(closed, 1, matrix_unit) == (order,)


@pytest.mark.parametrize(("matrix_unit", "order"), [(4, ROW_MAJOR), (8, (0, 1, 3, 2))])
def test_an_output_projection_that_fills_a_matrix_unit_is_in_its_own_order(matrix_unit, order):
  weight, context = jnp.zeros((2, 8, 4, 16)), jnp.zeros((2, 3, 8, 4))  # head_dim is 4
  assert operands.orders(jax.make_jaxpr(of_stages("rhd,hde->re"))(weight, context), 1, matrix_unit) == (order,)
  assert operands.orders(jax.make_jaxpr(of_stages("re,ehd->rhd"))(weight, context[:, :, :, 0]), 1, matrix_unit) == (
      ONE_MATRIX_PER_HEAD,
  )


HEADS_FIRST = (0, 2, 1, 3)


def on_one_device(fn):
  return jax.shard_map(fn, mesh=jax.make_mesh((1,), ("fsdp",)), in_specs=jax.P(), out_specs=jax.P(), check_vma=False)


@pytest.mark.parametrize(
    ("fn", "order"),
    [
        (lambda q: jnp.swapaxes(q, 1, 2), HEADS_FIRST),
        (jax.jit(lambda q: jnp.swapaxes(checkpoint_name(q, "query_proj"), 1, 2) * 2), HEADS_FIRST),
        (lambda q: on_one_device(lambda q: jnp.swapaxes(q, 2, 3) * 2)(jnp.swapaxes(q, 1, 2)), (0, 2, 3, 1)),
        (lambda q: jax.device_put(jnp.swapaxes(q, 1, 2), jax.memory.Space.Device) + 1, HEADS_FIRST),
        (lambda q: jnp.swapaxes(jnp.swapaxes(q, 1, 2), 1, 2) + q, ROW_MAJOR),
        (lambda q: (jnp.swapaxes(q, 1, 2), q + 1), ROW_MAJOR),
        (lambda q: (jnp.swapaxes(q, 1, 2), jnp.swapaxes(q, 2, 3)), ROW_MAJOR),
        (lambda q: q, ROW_MAJOR),
    ],
    ids=[
        *(
            "kernel",
            "within a call, named",
            "sequence last, within a shard_map",
            "from the host's memory",
            "there and back",
        ),
        *("something else beside it", "two orders", "returned as it is"),
    ],
)
def test_a_residual_is_in_memory_as_backward_reads_it(fn, order):
  closed = jax.make_jaxpr(lambda other, q: (other, fn(q)))(jnp.zeros(3), jnp.zeros((2, 8, 4, 16)))
  assert operands.residual_orders(closed.jaxpr, 1, 1) == (order,)


def test_residuals_of_kernels_are_told_from_others():
  mesh = jax.make_mesh((1,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
  spec = jax.sharding.PartitionSpec("fsdp")
  kernel = jax.shard_map(lambda x: (x * 2, x.sum(-1)), mesh=mesh, in_specs=spec, out_specs=(spec, spec))

  def forward(x):
    y, sums = jax.jit(kernel)(x)
    return checkpoint_name(sums, "sums"), y, y + 1, x

  closed = jax.make_jaxpr(forward)(jnp.zeros((4, 3)))
  assert operands.of_kernels(closed.jaxpr, range(4)) == (True, True, False, False)


def test_residuals_of_products_are_told_from_others_and_from_what_is_read_whole():
  mesh = jax.make_mesh((1,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
  spec = jax.sharding.PartitionSpec("fsdp")
  kernel = jax.shard_map(jnp.sin, mesh=mesh, in_specs=spec, out_specs=spec)
  rounded = lambda x: jax.lax.reduce_precision(x, 8, 7)

  def forward(x):
    read, transposed, of_kernel, only_kept = (rounded(checkpoint_name(x @ x.T, "product")) for _ in range(4))
    sines = rounded(jnp.sin(x))
    return read, sines, of_kernel, only_kept, transposed.T, (jnp.cos(read) @ x, sines + 1, kernel(of_kernel.T))

  closed = jax.make_jaxpr(forward)(jnp.zeros((4, 4)))
  # `transposed.T` is another variable than what the product is read as, and nothing reads it.
  assert operands.of_products(closed.jaxpr, range(5)) == (True, False, False, False, False)


def test_what_goes_to_the_hosts_memory_is_not_read_there():
  def forward(x):
    y = jax.device_put(x @ x.T, jax.memory.Space.Host)
    return y, jax.device_put(y, jax.memory.Space.Device) + 1

  assert operands.of_products(jax.make_jaxpr(forward)(jnp.zeros((4, 4))).jaxpr, [0]) == (False,)


@pytest.mark.parametrize(
    ("read", "is_part"),
    [
        (lambda y: y[..., 0], True),
        (lambda y: checkpoint_name(y[None], "context")[..., 0].T, True),
        (lambda y: y, False),
        (lambda y: y[:4], False),
        (lambda y: (2 * y)[..., 0], False),
        (lambda y: 2 * y[..., 0], False),
    ],
    ids=[
        "one lane",
        "one lane of a transposed copy",
        "all",
        "rows",
        "one lane of another operation's result",
        "more than cut out",
    ],
)
def test_what_is_cut_out_of_a_kernels_result_is_found(read, is_part):
  kernel = pl.pallas_call(lambda x, y: None, out_shape=jax.ShapeDtypeStruct((8, 128), jnp.float32))
  jaxpr = jax.make_jaxpr(lambda x: on_one_device(jax.jit(lambda x: read(kernel(x))))(x) + 1)(jnp.zeros((8, 128))).jaxpr
  on_devices, _ = jaxpr.eqns
  assert operands.parts_of_kernels(jaxpr) == (set(on_devices.outvars) if is_part else set())

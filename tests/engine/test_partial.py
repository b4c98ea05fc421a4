# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Weight gradients left as partial sums add up to the gradients; gradients that can be split are left in this way."""

import functools

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from maxtext_pp_ext.engine.programs.jaxprs import variables
from maxtext_pp_ext.engine.programs.partial import GradientProgram
from maxtext_pp_ext.engine.programs.roots import BatchSplit
from tests.engine.gradients import evaluated

BATCH, LENGTH, EMBED = 4, 6, 8
F32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)


def check(layer, weight_shape, split, parts, *, batch_axes=("fsdp",)):
  """Plans the gradient of `layer(weight, x)` and compares it with JAX's own."""
  weight = jax.random.normal(jax.random.key(0), weight_shape)
  x = jax.random.normal(jax.random.key(1), (BATCH, LENGTH, EMBED))
  cotangent = jax.random.normal(jax.random.key(2), jax.eval_shape(layer, weight, x).shape)
  backward = lambda w, x, d: jax.vjp(layer, w, x)[1](d)
  program = GradientProgram.plan(jax.make_jaxpr(backward)(weight, x, cotangent), [split], batch_axes, 1)
  assert program.gradients[0].parts == parts
  # What is to be computed before the gradient is passed on as it is.
  run = jax.jit(functools.partial(evaluated, program))
  (gradient,), (dx,), (overlapped,), _ = run([weight, x, cotangent], [[weight, None]])
  np.testing.assert_array_equal(overlapped[0], weight)
  expected, expected_dx = backward(weight, x, cotangent)
  assert gradient.shape == (parts, *weight_shape)
  np.testing.assert_allclose(gradient.sum(0), expected, rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose(dx, expected_dx, rtol=1e-5, atol=1e-5)
  return gradient


def dense(weight, x):
  return jnp.tanh(jnp.einsum("ble,ef->blf", x, weight))


def test_a_matrix_product_is_left_in_parts_of_the_batch():
  gradient = check(dense, (EMBED, 5), [BatchSplit(BATCH, 2)], 2)
  x = jax.random.normal(jax.random.key(1), (BATCH, LENGTH, EMBED))
  assert not np.allclose(gradient[0], gradient[1]) and x.shape[0] == BATCH


def test_parts_of_batch_and_sequence_multiply():
  check(dense, (EMBED, 5), [BatchSplit(BATCH, 2), BatchSplit(LENGTH, 3)], 6)


def test_a_part_is_what_that_part_of_the_batch_contributes():
  gradient = check(dense, (EMBED, 5), [BatchSplit(BATCH, 4)], 4)
  weight = jax.random.normal(jax.random.key(0), (EMBED, 5))
  x = jax.random.normal(jax.random.key(1), (BATCH, LENGTH, EMBED))
  cotangent = jax.random.normal(jax.random.key(2), (BATCH, LENGTH, 5))
  for k in range(4):
    of_part = jax.vjp(lambda w, k=k: dense(w, x[k : k + 1]), weight)[1](cotangent[k : k + 1])[0]
    np.testing.assert_allclose(gradient[k], of_part, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "layer, shape",
    [
        (lambda w, x: x * w, (EMBED,)),
        (lambda w, x: x * (1 + 0.1 * w), (EMBED,)),
        (lambda w, x: jnp.einsum("ble,hde->blhd", x, w), (2, 3, EMBED)),
        (lambda w, x: (x.reshape(BATCH * LENGTH, EMBED) @ w).reshape(BATCH, LENGTH, 5), (EMBED, 5)),
        (lambda w, x: x @ w + jnp.tanh(x) @ w, (EMBED, 5)),
        (jax.checkpoint(dense, prevent_cse=True), (EMBED, 5)),
        (lambda w, x: jax.jit(dense)(w, x), (EMBED, 5)),
    ],
    ids=["scale", "scaled by a constant", "transposed", "flattened batch", "used twice", "rematerialised", "called"],
)
def test_other_uses_are_left_in_parts_too(layer, shape):
  check(layer, shape, [BatchSplit(BATCH, 2)], 2)


def in_groups(weight, x):
  """Computes every second row at a time, as the batch-split schedule does."""
  rows = x.reshape(-1, 2, LENGTH, EMBED)
  return sum(dense(weight, rows[:, group]) for group in range(2))


def test_rows_that_are_computed_in_groups_are_told_from_a_sequence_of_a_multiple_of_them():
  assert LENGTH % (BATCH // 2) == 0
  gradient = check(in_groups, (EMBED, 5), [BatchSplit(BATCH, 2, BATCH // 2)], 2)
  x = jax.random.normal(jax.random.key(1), (BATCH, LENGTH, EMBED))
  weight = jax.random.normal(jax.random.key(0), (EMBED, 5))
  cotangent = jax.random.normal(jax.random.key(2), (BATCH // 2, LENGTH, 5))
  for k in range(2):  # a device has two rows that follow each other, one of each group
    of_device = lambda w, k=k: in_groups(w, x[2 * k : 2 * k + 2])
    expected = jax.vjp(of_device, weight)[1](cotangent[k : k + 1])[0]
    np.testing.assert_allclose(gradient[k], expected, rtol=1e-5, atol=1e-5)


def scaled(weight, x):
  """A layer whose gradient is scaled per output, as for quantized operands, and zero where the weight is clipped."""

  @jax.custom_vjp
  def product(weight, x):
    return x @ weight

  def backward(operands, d):
    weight, x = operands
    scale = jnp.max(jnp.abs(d), axis=(0, 1))
    dweight = jnp.einsum("ble,blf->ef", x, d / scale) * scale[None, :] / jnp.max(scale)
    return jnp.where(jnp.abs(weight) < 1, dweight, 0), d @ weight.T

  product.defvjp(lambda weight, x: (x @ weight, (weight, x)), backward)
  return product(weight, x)


def scaled_in_tiles(weight, x):
  """Like `scaled`, with a scale for each part of the sequence; there are as many parts as rows in the batch."""

  @jax.custom_vjp
  def product(weight, x):
    return x @ weight

  def backward(operands, d):
    weight, x = operands
    x, tiles = (a.reshape(BATCH, BATCH, -1, a.shape[-1]) for a in (x, d))  # [row, tile, …]
    scale = jnp.max(jnp.abs(tiles), axis=(0, 2))
    dweight = jnp.einsum("btle,btlf->tef", x, tiles / scale[:, None]) * scale[:, None, :]
    return dweight.sum(0), d @ weight.T

  product.defvjp(lambda weight, x: (x @ weight, (weight, x)), backward)
  return product(weight, x)


def test_what_is_scaled_afterwards_is_left_in_parts():
  check(scaled, (EMBED, 5), [BatchSplit(BATCH, 2)], 2)


def test_a_sum_over_scaled_tiles_is_not_taken_for_the_sum_over_the_batch():
  # BATCH tiles of the sequence, whose length is therefore a multiple of it.
  weight, x = jnp.ones((EMBED, 5)), jax.random.normal(jax.random.key(1), (BATCH, 2 * BATCH, EMBED))
  d = jax.random.normal(jax.random.key(2), (BATCH, 2 * BATCH, 5))
  backward = lambda w, x, d: jax.vjp(scaled_in_tiles, w, x)[1](d)
  program = GradientProgram.plan(jax.make_jaxpr(backward)(weight, x, d), [[BatchSplit(BATCH, 4)]], ("fsdp",), 1)
  assert program.gradients[0].parts == 4
  [root] = program.gradients[0].roots
  assert root.eqn.primitive.name == "dot_general"
  (gradient,), (dx,), *_ = evaluated(program, [weight, x, d])
  expected, expected_dx = backward(weight, x, d)
  np.testing.assert_allclose(gradient.sum(0), expected, rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose(dx, expected_dx, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "layer, split",
    [
        (dense, [BatchSplit(BATCH, 3)]),
        (dense, []),
        (lambda w, x: jax.lax.scan(lambda c, xi: (c, xi @ w), 0.0, x)[1], [BatchSplit(BATCH, 2)]),
        (lambda w, x: x @ jnp.sin(w), [BatchSplit(BATCH, 2)]),
    ],
    ids=["parts do not divide", "nothing asked for", "inside a loop", "not linear in what was summed"],
)
def test_what_cannot_be_split_is_left_whole_and_right(layer, split):
  check(layer, (EMBED, 5), split, 1)


def test_a_sum_inside_a_shard_map_is_done_outside_of_it():
  mesh = Mesh(np.array(jax.devices()[:4]), ("fsdp",))
  layer = jax.shard_map(dense, mesh=mesh, in_specs=(P(), P("fsdp")), out_specs=P("fsdp"), check_vma=False)
  check(layer, (EMBED, 5), [BatchSplit(BATCH, 4)], 4)
  check(layer, (EMBED, 5), [BatchSplit(BATCH, 4)], 1, batch_axes=("data",))


def test_a_factor_of_a_gradient_is_computed_once_for_all_products_that_use_it():
  """Without a barrier the TPU compiler computes tanh's derivative again within each of the two products."""
  weight, x = jnp.ones((EMBED, 5)), jnp.ones((BATCH, LENGTH, EMBED))
  backward = lambda w, x, d: jax.vjp(dense, w, x)[1](d)
  d = jnp.ones((BATCH, LENGTH, 5))
  program = GradientProgram.plan(jax.make_jaxpr(backward)(weight, x, d), [[BatchSplit(BATCH, 2)]], ("fsdp",), 1)
  (segment,) = program.segments
  eqns = segment.program.jaxpr.eqns
  (barrier,) = [eqn for eqn in eqns if eqn.primitive.name == "optimization_barrier"]
  users = [eqn.primitive.name for eqn in eqns if barrier.outvars[0] in eqn.invars]
  assert users.count("dot_general") == 1  # that of x's cotangent; the weight's gradient takes it from the outputs
  assert barrier.outvars[0] in program.gradients[0].needs


def test_a_lane_of_a_kernels_result_is_cut_out_once_for_all_that_read_it():
  filled = pl.pallas_call(lambda x, y: None, out_shape=jax.ShapeDtypeStruct((BATCH, LENGTH, 128), jnp.float32))

  def backward(w, x, d):
    lane = filled(x)[..., :1]
    return jnp.einsum("ble,blf->ef", x, d * lane), jnp.einsum("blf,ef->ble", d, w) * jnp.tanh(lane)

  d = jnp.ones((BATCH, LENGTH, 5))
  closed = jax.make_jaxpr(backward)(jnp.ones((EMBED, 5)), jnp.ones((BATCH, LENGTH, EMBED)), d)
  program = GradientProgram.plan(closed, [[BatchSplit(BATCH, 2)]], ("fsdp",), 1)
  (segment,) = program.segments
  eqns = segment.program.jaxpr.eqns
  (lane,) = [eqn.outvars[0] for eqn in eqns if eqn.primitive.name == "slice"]
  assert [eqn.primitive.name for eqn in eqns if lane in eqn.invars] == ["optimization_barrier"]


def normed(weight, x):
  """A norm's scale, which MaxText multiplies by `dot_general`."""
  return jnp.tanh(jnp.einsum("ble,e->ble", jnp.sin(x), weight))


@pytest.mark.parametrize(("layer", "shape", "barriers"), [(dense, (EMBED, 5), 1), (normed, (EMBED,), 0)])
def test_factors_are_computed_once_for_matrix_products_only(layer, shape, barriers):
  """The sum of an elementwise product reads each factor once. It needs none of them in memory."""
  weight, x = jnp.ones(shape), jnp.ones((BATCH, LENGTH, EMBED))
  backward = lambda w, x, d: jax.vjp(layer, w, x)[1](d)
  closed = jax.make_jaxpr(backward)(weight, x, layer(weight, x))
  program = GradientProgram.plan(closed, [[BatchSplit(BATCH, 2)]], ("fsdp",), 1)
  assert str(program.segments).count("optimization_barrier") == barriers
  check(layer, shape, [BatchSplit(BATCH, 2)], 2)


def test_a_factor_that_several_products_name_or_lay_out_is_computed_once():
  def layer(weights, x):
    y = jnp.sin(x)
    return checkpoint_name(y, "query") @ weights[0] + checkpoint_name(y, "key") @ weights[1]

  weights, x = jnp.ones((2, EMBED, EMBED)), jnp.ones((BATCH, LENGTH, EMBED))
  backward = lambda a, b, x, d: jax.vjp(jax.checkpoint(lambda a, b, x: layer((a, b), x)), a, b, x)[1](d)
  program = GradientProgram.plan(jax.make_jaxpr(backward)(*weights, x, x), [[BatchSplit(BATCH, 2)]] * 2, ("fsdp",), 1)
  (segment,) = program.segments
  made_by = {v: eqn.primitive.name for eqn in segment.program.jaxpr.eqns for v in eqn.outvars}
  barriers = [eqn for eqn in segment.program.jaxpr.eqns if eqn.primitive.name == "optimization_barrier"]
  factors = [made_by[v] for eqn in barriers for v in eqn.invars if v in made_by]
  assert [name for name in factors if name != "optimization_barrier"] == ["sin"]  # `checkpoint` adds barriers, too


def test_factors_of_one_type_are_not_mistaken_for_each_other():
  def layer(weights, x):
    return jnp.tanh(x @ weights[0]) @ weights[1] + jnp.sin(x @ weights[0]) @ weights[1]

  weights = jax.random.normal(jax.random.key(0), (2, EMBED, EMBED))
  x = jax.random.normal(jax.random.key(1), (BATCH, LENGTH, EMBED))
  d = jax.random.normal(jax.random.key(2), (BATCH, LENGTH, EMBED))
  backward = lambda a, b, x, d: jax.vjp(lambda a, b, x: layer((a, b), x), a, b, x)[1](d)
  program = GradientProgram.plan(jax.make_jaxpr(backward)(*weights, x, d), [[BatchSplit(BATCH, 2)]] * 2, ("fsdp",), 1)
  assert [each.parts for each in program.gradients] == [2, 2]
  gradients, (dx,), *_ = evaluated(program, [*weights, x, d])
  expected = backward(*weights, x, d)
  for found, right in zip([*(g.sum(0) for g in gradients), dx], expected, strict=True):
    np.testing.assert_allclose(found, right, rtol=1e-4, atol=1e-4)


def test_nothing_reads_a_weight_after_what_its_gradient_waits_for():
  """The buffer that holds a weight is written to by the product that computes its gradient."""
  weights = jax.random.normal(jax.random.key(0), (2, EMBED, EMBED))
  x = jax.random.normal(jax.random.key(1), (BATCH, LENGTH, EMBED))
  layers = jax.checkpoint(lambda a, b, x: dense(b, dense(a, x)), prevent_cse=False)
  backward = lambda a, b, x, d: jax.vjp(layers, a, b, x)[1](d)
  closed = jax.make_jaxpr(backward)(*weights, x, x)
  program = GradientProgram.plan(closed, [[BatchSplit(BATCH, 2)]] * 2, ("fsdp",), 1, reads=[[0], [1]])
  eqns = [eqn for segment in program.segments for eqn in segment.program.jaxpr.eqns]
  made_by = {v: eqn for eqn in eqns for v in eqn.outvars}
  for weight, gradient in zip(program.inputs[:2], program.gradients, strict=True):
    there, todo = set(), [*gradient.readers, *gradient.needs]
    while todo:
      if (eqn := made_by.get(todo.pop())) is not None and id(eqn) not in there:
        there.add(id(eqn))
        todo += [v for v in variables(eqn.invars) if v in program.inputs or v in made_by]
    assert {id(eqn) for eqn in eqns if weight in variables(eqn.invars)} <= there
  # The product that gives the cotangent of the input reads the first weight, and no gradient waits for it otherwise.
  assert {made_by[v].primitive.name for v in program.gradients[0].readers} == {"dot_general"}

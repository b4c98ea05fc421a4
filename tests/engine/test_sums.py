# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""A gradient that is one product is added by each device for itself, and finishes the sum where it waits."""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from maxtext_pp_ext.engine.gradients import Gradients
from maxtext_pp_ext.engine.programs.partial import GradientProgram
from maxtext_pp_ext.engine.sums import Item, splits
from maxtext_pp_ext.engine.weight_layout import WeightLayout
from maxtext_pp_ext.engine.weights import Weights
from maxtext_pp_ext.schedule import Residency

STAGES, ROWS, LENGTH, EMBED, HEADS, DIM = 2, 4, 3, 8, 4, 5
BF16, F32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)

# einsum of a layer, shape of its weight, how the weight is stored, and how a stage computes with it
LAYERS = {
    "a matrix": ("ble,ef->blf", (EMBED, 6), P("stage", "fsdp", None), P("stage", None, None)),
    "heads": ("ble,ehd->blhd", (EMBED, HEADS, DIM), P("stage", "fsdp", "tensor", None), P("stage", None, "tensor", None)),
    "back from heads": (
        "blhd,hde->ble",
        (HEADS, DIM, EMBED),
        P("stage", None, None, "fsdp"),
        P("stage", None, None, None),
    ),
    "a product for each dimension": ("blhd,hd->blh", (HEADS, DIM), P("stage", None, None), P("stage", None, None)),
}


@pytest.fixture(name="mesh", scope="module")
def _mesh():
  return Mesh(np.array(jax.devices()[:8]).reshape(2, 2, 2), ("stage", "fsdp", "tensor"))


def planned(mesh, einsum, shape, stored, gathered, residency):
  """(gradients, program, its inputs, the gradient of each half of the rows [2, S, …])."""
  layout = WeightLayout(
      sharded=stored,
      gathered=gathered,
      partial_axes=("fsdp",),
      compute_dtype=BF16,
      accumulation_dtype=F32,
  )
  inputs = einsum.partition(",")[0]
  sizes = {"b": ROWS, "l": LENGTH, "e": EMBED, "h": HEADS, "d": DIM}
  weight = jax.random.normal(jax.random.key(0), (STAGES, *shape))
  x = jax.random.normal(jax.random.key(1), (STAGES, *(sizes[name] for name in inputs)))
  stages = jax.vmap(lambda w, x: jnp.einsum(einsum, x, w))
  cotangent = jax.random.normal(jax.random.key(2), jax.eval_shape(stages, weight, x).shape)
  backward = lambda w, x, d: jax.vjp(stages, w, x)[1](d)
  batch = [(ROWS, ("fsdp",)), (LENGTH, ())]
  closed = jax.make_jaxpr(backward)(weight, x, cotangent)
  program = GradientProgram.plan(closed, splits(mesh, [layout], batch), ("fsdp",), 1, reads=[[0]])
  weights = Weights(residency=residency, mesh=mesh, layouts=[layout], pieces=4)
  params = [jnp.zeros((3, *weight.shape))]
  gradients = Gradients.of(weights, params, program.parts, [range(weight.ndim)], program.parts_on_device)
  of_rows = lambda rows: backward(weight, x[:, rows], cotangent[:, rows])[0]
  return gradients, program, (weight, x, cotangent), jnp.stack([of_rows(slice(0, 2)), of_rows(slice(2, 4))])


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS.keys())
def test_a_device_computes_the_same_part_of_a_product_as_the_compiler_gives_it(mesh, layer):
  gradients, program, args, expected = planned(mesh, *layer, Residency.REPEAT)
  (product,) = gradients.parts_on_device
  assert product is not None
  (whole,), *_ = jax.jit(program.run)(args, [None])
  np.testing.assert_allclose(whole, expected, rtol=1e-5, atol=1e-5)
  left, right = product.layouts(gradients.layouts[0].by_device)

  def on_device(*operands):
    of_stage = [jnp.squeeze(x, dim) for x, dim in zip(operands, product.stages, strict=True)]
    return product.on_device(*of_stage)[:, None]

  def run(*args):
    by_device = gradients.layouts[0].by_device.spec
    each = jax.shard_map(on_device, mesh=mesh, in_specs=(left.spec, right.spec), out_specs=by_device, check_vma=False)
    return program.run(args, [None], lambda _, summand: each(*summand.operands))[0][0]

  np.testing.assert_allclose(jax.jit(run)(*args), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("residency", [Residency.REPEAT, Residency.ONCE], ids=["window", "beside"])
def test_the_last_gradient_of_a_repeat_is_added_where_the_sum_waits(mesh, residency):
  """Stage 0 adds the last gradient of repeat 2; stage 1 is in a bubble, then in a repeat, then at its first gradient."""
  gradients, program, args, expected = planned(mesh, *LAYERS["heads"], residency)
  before = jax.random.normal(jax.random.key(3), expected.shape)
  window = jax.random.normal(jax.random.key(4), (2, *expected.shape)).astype(BF16)
  done = jax.random.normal(jax.random.key(5), expected.shape).astype(BF16)
  in_window = residency is Residency.REPEAT
  for works, first in ((False, False), (True, False), (True, True)):
    item = Item(
        repeat=jnp.array([2, 1]),
        works=jnp.array([True, works]),
        first=jnp.array([False, first]),
        finishes=jnp.array([True, False]),
    )

    @jax.jit
    def step(args, before, window, done, item):
      sums = gradients.zeros()._replace(total=[before], done=[None if in_window else done])
      windowed = [window if in_window else None]
      added, *_ = program.run(args, [None], gradients.adder(sums, windowed, item))
      sums, windowed = gradients.add(sums, windowed, added, item)
      return gradients.finish_repeat(sums, windowed, item.repeat, item.finishes)

    sums, windowed = step(args, before, window, done, item)
    finished = (before + expected)[:, 0].astype(BF16)
    np.testing.assert_allclose(
        sums.total[0][:, 1], (0 if first else before[:, 1]) + works * expected[:, 1], rtol=1e-5, atol=1e-5
    )
    if in_window:
      np.testing.assert_allclose(windowed[0][0, :, 0].astype(F32), finished.astype(F32), rtol=0.01, atol=0.01)
      np.testing.assert_array_equal(windowed[0][1], window[1])
      np.testing.assert_array_equal(windowed[0][0, :, 1], window[0, :, 1])
    else:
      np.testing.assert_allclose(sums.done[0][:, 0].astype(F32), finished.astype(F32), rtol=0.01, atol=0.01)
      np.testing.assert_array_equal(sums.done[0][:, 1], done[:, 1])


def test_what_is_not_one_product_is_added_outside_of_a_branch(mesh):
  twice = lambda w, x: jnp.einsum("ble,ef->blf", x, w) + jnp.einsum("ble,ef->blf", jnp.tanh(x), w)
  scaled = lambda w, x: jnp.einsum("ble,ef->blf", x, w) * 0.5
  for layer, is_product in ((twice, False), (scaled, True)):
    backward = lambda w, x, d, layer=layer: jax.vjp(jax.vmap(layer), w, x)[1](d)
    shapes = [(STAGES, EMBED, 6), (STAGES, ROWS, LENGTH, EMBED), (STAGES, ROWS, LENGTH, 6)]
    closed = jax.make_jaxpr(backward)(*(jax.ShapeDtypeStruct(shape, F32) for shape in shapes))
    layout = WeightLayout(
        sharded=P("stage", "fsdp"), gathered=P("stage"), partial_axes=("fsdp",), compute_dtype=F32, accumulation_dtype=F32
    )
    split = splits(mesh, [layout], [(ROWS, ("fsdp",)), (LENGTH, ())])
    program = GradientProgram.plan(closed, split, ("fsdp",), 1, reads=[[0]])
    assert program.parts == (2,)
    assert (program.parts_on_device[0] is not None) is is_product


@pytest.mark.parametrize(
    "axes, pieces, together",
    [
        (("fsdp",), 1, [[(8, 4), (16, 4)]]),  # two devices exchange beside compute
        (("fsdp", "tensor"), 1, []),
        (("fsdp",), 2, []),
    ],
)
def test_gradients_are_ready_together_if_they_are_whole_and_reduced_beside_compute(axes, pieces, together):
  mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 2, 2), ("stage", "fsdp", "tensor"))
  layout = WeightLayout(
      sharded=P("stage", axes, None),
      gathered=P("stage", None, None),
      partial_axes=axes,
      compute_dtype=BF16,
      accumulation_dtype=F32,
  )
  weights = Weights(residency=Residency.REPEAT, mesh=mesh, layouts=[layout] * 2, pieces=pieces)
  params = [jnp.zeros((3, STAGES, rows, 4)) for rows in (8, 16)]
  parts = 2 ** len(axes)
  gradients = Gradients.of(weights, params, [parts] * 2, [range(3)] * 2, [None] * 2)
  window = [jnp.zeros((2, parts, *each.shape[1:]), BF16) for each in params]
  numbers = jnp.zeros((STAGES,), jnp.int32)
  reduce = lambda sums, window: gradients.reduce(sums, window, numbers, numbers, numbers)
  jaxpr = jax.make_jaxpr(reduce)(gradients.zeros(), window).jaxpr
  windows = {var for var in jaxpr.invars if var.aval.ndim == window[0].ndim}
  ready = [
      [var.aval.shape[2:] for var in eqn.invars if var not in windows]
      for eqn in jaxpr.eqns
      if eqn.primitive.name == "optimization_barrier"
  ]
  assert [each for each in ready if len(each) > 1] == together

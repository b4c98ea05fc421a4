# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""A gradient that is one product is added by each device for itself, and finishes the sum where it waits."""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from maxtext_pp_ext.engine import backward
from maxtext_pp_ext.engine.order import in_order
from maxtext_pp_ext.engine.programs.partial import GradientProgram
from maxtext_pp_ext.engine.weights import of_all
from maxtext_pp_ext.engine.weights.accumulators import Item
from maxtext_pp_ext.engine.weights.layout import WeightLayout
from maxtext_pp_ext.engine.weights.of_all import weights_of
from maxtext_pp_ext.schedule import GatherPolicy
from tests.engine.common import build, gradient_program
from tests.engine.gradients import evaluated, PartialSum

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


def planned(mesh, einsum, shape, stored, gathered, gather_policy):
  """(the weight, program, its inputs, the gradient of each half of the rows [2, S, …])."""
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
  program = GradientProgram.plan(closed, [layout.batch_splits(mesh, batch)], ("fsdp",), 1, reads=[[0]])
  (of,) = weights_of([layout], [jax.ShapeDtypeStruct((3, *weight.shape), F32)], mesh, gather_policy, chunks=4)
  of_rows = lambda rows: backward(weight, x[:, rows], cotangent[:, rows])[0]
  of = of.with_(gradient=program.gradients[0])
  return of, program, (weight, x, cotangent), jnp.stack([of_rows(slice(0, 2)), of_rows(slice(2, 4))])


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS.keys())
def test_a_device_computes_the_same_part_of_a_product_as_the_compiler_gives_it(mesh, layer):
  weight, program, args, expected = planned(mesh, *layer, GatherPolicy.REPEAT)
  product = program.gradients[0].on_device
  assert product is not None
  (whole,), *_ = jax.jit(lambda args: evaluated(program, args))(args)
  np.testing.assert_allclose(whole, expected, rtol=1e-5, atol=1e-5)
  left, right = product.layouts(weight.layout.by_device)

  def on_device(*operands):
    of_stage = [jnp.squeeze(x, dim) for x, dim in zip(operands, product.stages, strict=True)]
    return product.on_device(*of_stage)[:, None]

  def run(*args):
    by_device = weight.layout.by_device.spec
    each = jax.shard_map(on_device, mesh=mesh, in_specs=(left.spec, right.spec), out_specs=by_device, check_vma=False)
    return evaluated(program, args, compute=lambda number, of, operands: each(*operands.of_roots[0]))[0][0]

  np.testing.assert_allclose(jax.jit(run)(*args), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("gather_policy", [GatherPolicy.REPEAT, GatherPolicy.ONCE], ids=["window", "beside"])
def test_the_last_gradient_of_a_repeat_is_added_where_the_sum_waits(mesh, gather_policy):
  """Stage 0 adds the last gradient of repeat 2; stage 1 is in a bubble, then in a repeat, then at its first gradient."""
  weight, program, args, expected = planned(mesh, *LAYERS["heads"], gather_policy)
  before = jax.random.normal(jax.random.key(3), expected.shape)
  buffers = jax.random.normal(jax.random.key(4), (2, *expected.shape)).astype(BF16)
  done = jax.random.normal(jax.random.key(5), expected.shape).astype(BF16)
  in_buffers = gather_policy is GatherPolicy.REPEAT
  for works, first in ((False, False), (True, False), (True, True)):
    item = Item(
        repeat=jnp.array([2, 1]),
        works=jnp.array([True, works]),
        first=jnp.array([False, first]),
        finishes=jnp.array([True, False]),
    )

    @jax.jit
    def step(args, before, buffers, done, item):
      begun = weight.zeros().with_(total=before, **({"buffers": buffers} if in_buffers else {"finished": done}))
      added = in_order(program, args, [begun], item, item.repeat)
      weights = of_all.add_complete(added.weights, added.complete, item.repeat, item.works)
      return of_all.finish_repeat(weights, item.repeat, item.finishes)

    (found,) = step(args, before, buffers, done, item)
    finished = (before + expected)[:, 0].astype(BF16)
    np.testing.assert_allclose(
        found.total[:, 1], (0 if first else before[:, 1]) + works * expected[:, 1], rtol=1e-5, atol=1e-5
    )
    if in_buffers:
      np.testing.assert_allclose(found.buffers[0, :, 0].astype(F32), finished.astype(F32), rtol=0.01, atol=0.01)
      np.testing.assert_array_equal(found.buffers[1], buffers[1])
      np.testing.assert_array_equal(found.buffers[0, :, 1], buffers[0, :, 1])
    else:
      np.testing.assert_allclose(found.finished[:, 0].astype(F32), finished.astype(F32), rtol=0.01, atol=0.01)
      np.testing.assert_array_equal(found.finished[:, 1], done[:, 1])


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
    split = layout.batch_splits(mesh, [(ROWS, ("fsdp",)), (LENGTH, ())])
    (gradient,) = GradientProgram.plan(closed, [split], ("fsdp",), 1, reads=[[0]]).gradients
    assert gradient.parts == 2
    assert (gradient.on_device is not None) is is_product


@pytest.mark.parametrize(
    "axes, chunks, together",
    [
        (("fsdp",), 1, [[(8, 4), (16, 4)]]),  # two devices exchange overlapped with compute
        (("fsdp", "tensor"), 1, []),
        (("fsdp",), 2, []),
    ],
)
def test_gradients_are_ready_together_if_they_are_whole_and_reduced_beside_compute(axes, chunks, together):
  mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 2, 2), ("stage", "fsdp", "tensor"))
  layout = WeightLayout(
      sharded=P("stage", axes, None),
      gathered=P("stage", None, None),
      partial_axes=axes,
      compute_dtype=BF16,
      accumulation_dtype=F32,
  )
  params = [jax.ShapeDtypeStruct((3, STAGES, rows, 4), F32) for rows in (8, 16)]
  weights = [w.with_(gradient=PartialSum()) for w in weights_of([layout] * 2, params, mesh, GatherPolicy.REPEAT, chunks)]
  buffers = [jnp.zeros((2, 2 ** len(axes), *each.shape[1:]), BF16) for each in params]
  numbers = jnp.zeros((STAGES,), jnp.int32)
  behind = backward._behind_all_sums if chunks == 1 else backward._behind_their_own_chunks

  def leave(buffers):
    begun = [w.zeros().with_(buffers=buffers[k]) for k, w in enumerate(weights)]
    return behind(of_all.cut_out(begun, numbers, numbers))

  jaxpr = jax.make_jaxpr(leave)(buffers).jaxpr
  ready = [
      [var.aval.shape[2:] for var in eqn.invars if var not in jaxpr.invars]
      for eqn in jaxpr.eqns
      if eqn.primitive.name == "optimization_barrier"
  ]
  assert [each for each in ready if len(each) > 1] == together


def test_each_gradient_of_a_layer_is_left_as_a_partial_sum(monkeypatch):
  """Those of norms, too. The types with which stages are traced have layouts, which decide what comes last."""
  planned_programs = []
  plan = GradientProgram.plan.__func__
  keep = classmethod(lambda cls, *args, **keys: planned_programs.append(plan(cls, *args, **keys)) or planned_programs[-1])
  monkeypatch.setattr(GradientProgram, "plan", keep)
  gradient_program(build("llama", pipeline_impl="circular_bsw", stages=2, repeats=2, microbatches=2))
  assert planned_programs and all(each.is_partial for program in planned_programs for each in program.gradients)

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Weights gathered in chunks equal the weights, gradients reduced in chunks equal their sum, at any item of a stage."""

import types
from unittest import mock

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from maxtext_pp_ext.engine import forward
from maxtext_pp_ext.engine.transfers.transfer import Cut, Transfer
from maxtext_pp_ext.engine.weights import layout as layouts
from maxtext_pp_ext.engine.weights import of_all
from maxtext_pp_ext.engine.weights.accumulators import Item
from maxtext_pp_ext.engine.weights.layout import WeightLayout
from maxtext_pp_ext.engine.weights.of_all import weights_of
from maxtext_pp_ext.schedule import GatherPolicy
from maxtext_pp_ext.sharding import constrain, gathered_last
from tests.engine.gradients import PartialSum
from tests.marks import slow_but

REPEATS, STAGES = 4, 2
F32 = jnp.dtype(jnp.float32)

# shape of one stage's weight, how it is stored, and how a stage computes with it
WEIGHTS = {
    "chunks divide": ((8, 5), P("stage", "a", None), P("stage", None, None)),
    "chunks do not divide": ((6, 5), P("stage", "a", None), P("stage", None, None)),
    "fewer rows than chunks": ((4,), P("stage", "a"), P("stage", None)),
    "a vector over both axes": ((24,), P("stage", ("a", "b")), P("stage", None)),
    "two gathered dimensions": ((6, 4, 10), P("stage", "a", None, "b"), P("stage", None, None, None)),
    "one dimension is kept": ((6, 10), P("stage", "a", "b"), P("stage", None, "b")),
    "the first of two axes is kept": ((24, 3), P("stage", ("b", "a"), None), P("stage", "b", None)),
    "the second of two axes is kept": ((24, 3), P("stage", ("a", "b"), None), P("stage", "b", None)),
    "parts as wide as a tile": ((5, 256), P("stage", None, "b"), P("stage", None, None)),
    "nothing is sharded": ((3, 5), P("stage", None, None), P("stage", None, None)),
    "a scalar": ((), P("stage"), P("stage")),
}


@pytest.fixture(name="mesh", scope="module")
def _mesh(request):
  """2 × 2 devices for each stage, or for both stages."""
  devices = np.array(jax.devices()[: getattr(request, "param", 8)])
  return Mesh(devices.reshape(-1, 2, 2), ("stage", "a", "b"))


def layout(stored, gathered, partial_axes=("a", "b")):
  return WeightLayout(
      sharded=gathered_last(stored, gathered),
      gathered=gathered,
      partial_axes=tuple(a for a in partial_axes if a not in jax.tree.leaves(tuple(gathered))),
      compute_dtype=F32,
      accumulation_dtype=F32,
  )


def weight(mesh, params, layout, chunks, gradient=None, transposed=False):
  order = (0, *range(1, params.ndim - 1)[::-1]) if transposed else ()
  return weights_of([layout], [params], mesh, GatherPolicy.REPEAT, chunks)[0].with_(gradient=gradient, order=order)


def put_over_slices(monkeypatch, axes):
  monkeypatch.setattr(layouts, "slices_along", lambda mesh, axis: 2 if axis in axes else 1)


DEVICES_AND_OVER_SLICES = pytest.mark.parametrize(
    "mesh, over_slices",
    slow_but([(8, ()), (4, ("b",))], [(d, o) for d in (8, 4) for o in ((), ("b",), ("a",), ("a", "b"))], spread=True),
    indirect=["mesh"],
)
OVER_SLICES = pytest.mark.parametrize("over_slices", slow_but([(), ("b",)], [(), ("b",), ("a",), ("a", "b")]))
CHUNKS = pytest.mark.parametrize(
    "chunks, transposed", slow_but([(3, False), (4, True)], [(3, False), (4, False), (4, True)], spread=True)
)


@CHUNKS
@pytest.mark.parametrize("shape, stored, gathered", WEIGHTS.values(), ids=WEIGHTS.keys())
def test_all_chunks_of_a_repeat_are_the_repeat_of_each_stage(mesh, shape, stored, gathered, chunks, transposed):
  params = constrain(jax.random.normal(jax.random.key(0), (REPEATS, STAGES, *shape)), P(None, *stored), mesh)
  at, repeat = jnp.array([2, 0]), jnp.array([3, 1])  # each stage is at another one

  @jax.jit
  def prefetch(params):
    of = weight(mesh, params, layout(stored, gathered), chunks, transposed=transposed)
    weights = [of.load(params).first().open(0).ordered()]
    for k in range(chunks):
      chunk = jnp.array([k, chunks - 1 - k])
      weights = of_all.place(of_all.gather(weights, repeat, chunk), at, chunk)
    return [of_all.use(weights, numbers)[0] for numbers in (at, repeat, jnp.array([2, 1]))]

  before, after, half = prefetch(params)
  np.testing.assert_array_equal(after, [params[3, 0], params[1, 1]])
  if not weight(mesh, params, layout(stored, gathered), chunks).has_buffers:  # read where it is stored
    np.testing.assert_array_equal(before, [params[2, 0], params[0, 1]])
  else:
    np.testing.assert_array_equal(before, params[0])
    np.testing.assert_array_equal(half, [params[0, 0], params[1, 1]])


@CHUNKS
# Where "b" is kept, the first of these is one axis, too.
@pytest.mark.parametrize("partial_axes", slow_but([("a", "b")], [("a", "b"), ("a",), ("b",)]))
@OVER_SLICES
@pytest.mark.parametrize("shape, stored, gathered", WEIGHTS.values(), ids=WEIGHTS.keys())
def test_chunks_of_a_sum_leave_for_its_repeats_place_where_chunks_of_a_weight_come_in(
    mesh, shape, stored, gathered, partial_axes, over_slices, chunks, transposed, monkeypatch
):
  put_over_slices(monkeypatch, over_slices)
  each = layout(stored, gathered, partial_axes)
  if not each.partial_axes:
    pytest.skip("the gradient is complete")
  params = jax.random.normal(jax.random.key(0), (REPEATS, STAGES, *shape))
  parts = 2 ** len(each.partial_axes)
  done = jax.random.normal(jax.random.key(1), (parts, STAGES, *shape))
  total = jax.random.normal(jax.random.key(2), (parts, STAGES, *shape))
  finished, repeat, following = jnp.array([3, 2]), jnp.array([2, 1]), jnp.array([1, 0])
  everywhere = jnp.array([True, True])

  @jax.jit
  def reduce(params, done, total):
    of = weight(mesh, params, each, chunks, PartialSum(), transposed)
    weights = [of.load(params).first().open(0).ordered().zeros().with_(total=done)]
    weights = [w.with_(total=total) for w in of_all.finish_repeat(weights, finished, everywhere)]
    for k in range(chunks):
      chunk = jnp.array([k, chunks - 1 - k])
      weights = of_all.reduce(of_all.cut_out(weights, repeat, chunk), finished, chunk)
      weights = of_all.place(of_all.gather(weights, following, chunk), repeat, chunk)
    return of_all.finish(weights)[0], of_all.use(weights, following)[0]

  reduced, current = reduce(params, done, total)
  expected = np.zeros((REPEATS, STAGES, *shape), np.float32)
  expected[0] = total.sum(0)
  expected[3, 0], expected[2, 1] = done.sum(0)
  np.testing.assert_allclose(reduced, expected, rtol=1e-6, atol=1e-6)
  np.testing.assert_array_equal(current, [params[1, 0], params[0, 1]])


@pytest.mark.parametrize("shape, stored, gathered", WEIGHTS.values(), ids=WEIGHTS.keys())
@DEVICES_AND_OVER_SLICES
def test_a_repeat_in_one_chunk_replaces_the_one_before_and_its_gradient_leaves_from_where_it_is_computed(
    mesh, shape, stored, gathered, over_slices, monkeypatch
):
  put_over_slices(monkeypatch, over_slices)
  each = layout(stored, gathered)
  params = constrain(jax.random.normal(jax.random.key(0), (REPEATS, STAGES, *shape)), P(None, *stored), mesh)
  parts = 2 ** len(each.partial_axes)
  totals = jax.random.normal(jax.random.key(1), (2, parts, STAGES, *shape))
  finished, following, chunk = jnp.array([2, 3]), jnp.array([3, 1]), jnp.array([0, 0])
  where = jnp.array([True, True])

  @jax.jit
  def step(params, totals):
    weights = [weight(mesh, params, each, 1, PartialSum()).load(params).first().open(0).zeros()]
    before = of_all.use(weights, jnp.array([0, 0]))
    at = lambda repeat: Item(repeat=repeat, works=where, first=where, finishes=None)
    weights = [w.added(w.accumulate((totals[0], ()), at(finished))) for w in weights]
    weights = of_all.finish_repeat(weights, finished, where)
    weights = of_all.reduce(of_all.cut_out(weights, following, chunk), finished, chunk)
    weights = of_all.place(of_all.gather(weights, following, chunk), finished, chunk)
    weights = [w.added(w.accumulate((totals[1], ()), at(following * 0))) for w in weights]
    return before[0], of_all.use(weights, following)[0], of_all.finish(weights)[0]

  before, after, reduced = step(params, totals)
  np.testing.assert_array_equal(before, params[0])
  np.testing.assert_array_equal(after, [params[3, 0], params[1, 1]])
  expected = np.zeros((REPEATS, STAGES, *shape), np.float32)
  expected[0] = totals[1].sum(0)
  expected[2, 0], expected[3, 1] = totals[0].sum(0)
  np.testing.assert_allclose(reduced, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "axes, shard, chunks, cut",
    [
        ((("a",), ()), (256, 28672), 8, Cut(1, 3584)),  # columns of whole tiles, no view by device
        (((), ("a",)), (28672, 256), 8, Cut(0, 3584)),
        ((("a",), (), ()), (256, 64, 128), 8, Cut(0, 32)),  # a dimension that no tile has
        ((("a",), ()), (256, 40), 8, Cut(0, 32)),  # five columns would shift
        (((), ("a",)), (5, 512), 4, Cut(1, 128)),  # eight rows for five would waste too much
        (((),), (3,), 8, Cut(0, 1)),
        ((), (), 8, None),
    ],
)
def test_weights_are_cut_where_chunks_are_copied_easily(axes, shard, chunks, cut):
  assert Transfer(axes=axes, shard=shard, chunks=chunks).cut == cut


@pytest.mark.parametrize(
    "devices, steps, asynchronous",
    [
        pytest.param((2, 1), (), True, id="two devices"),
        pytest.param((4, 1), (), False, id="more devices"),
        pytest.param((4, 1), (("fsdp", (2, 2, 1)),), True, id="on the SparseCores"),
        pytest.param((4, 1), (("expert", (4, 1, 1)),), False, id="another axis on the SparseCores"),
    ],
)
def test_transfers_run_beside_compute_over_two_devices_or_on_the_sparsecores(devices, steps, asynchronous):
  transfer = Transfer(axes=(("fsdp",), ()), shard=(8, 128), chunks=1, devices=devices, steps=steps)
  assert transfer.is_asynchronous is asynchronous


def in_slices(shape, slices, kind="TPU v6 lite"):
  """A mesh of four devices in slices."""
  devices = [types.SimpleNamespace(device_kind=kind, platform="cpu", slice_index=number) for number in slices]
  mesh = mock.create_autospec(Mesh, instance=True)
  mesh.devices, mesh.shape, mesh.size = np.array(devices).reshape(tuple(shape.values())), shape, 4
  mesh.axis_names = tuple(shape)
  return mesh


@pytest.mark.parametrize(
    ("slices", "axes"),
    [
        pytest.param([0, 0, 0, 0], (), id="one slice"),
        pytest.param([0, 0, 1, 1], ("a",), id="replicas in two slices"),
        pytest.param([0, 1, 0, 1], (), id="sharded over slices"),
    ],
)
def test_a_gradient_is_summed_over_replicas_in_other_slices_once_it_is_scattered(slices, axes):
  mesh = in_slices({"a": 2, "b": 2}, slices)
  of = layout(P(None, "b", None), P(None, None, None))
  assert of.transfer(mesh, (REPEATS, 1, 8, 5), 1).summed_after == axes


@pytest.mark.parametrize(
    ("kind", "slices", "beside"),
    [
        pytest.param("TPU v5 lite", [0, 0, 0, 0], True, id="v5e"),
        pytest.param("TPU v5 lite", [0, 0, 1, 1], False, id="v5e, over slices"),
        pytest.param("TPU v6 lite", [0, 0, 0, 0], False, id="v6e"),
    ],
)
def test_gathers_run_beside_compute_within_a_slice_of_v5e(kind, slices, beside):
  mesh = in_slices({"a": 4}, slices, kind)
  of = layout(P(None, "a", None), P(None, None, None), ("a",))
  transfer = of.transfer(mesh, (REPEATS, 1, 8, 5), 1)
  assert transfer.slices == ((("a", 2),) if 1 in slices else ())
  assert (transfer.is_gather_asynchronous, transfer.is_asynchronous) == (beside, False)
  gathered = weights_of([of], [jax.ShapeDtypeStruct((REPEATS, 1, 8, 5), F32)], mesh, GatherPolicy.REPEAT, 1)[0]
  assert ("arriving" in forward._overlapped(gathered)) is beside


@pytest.mark.parametrize(
    "over_slices, sharded, name",
    [
        pytest.param((), "a", "stored", id="one slice"),
        pytest.param(("b",), "a", "scattered", id="replicas in two slices"),
        pytest.param(("a",), "a", "stored", id="sharded over slices"),
        pytest.param(("b",), None, "scattered", id="whole in two slices"),
    ],
)
def test_a_gradient_waits_for_the_devices_of_its_slice_only(mesh, monkeypatch, over_slices, sharded, name):
  """What goes between slices may end later; the next gradient takes the memory before."""
  put_over_slices(monkeypatch, over_slices)
  each, at = layout(P("stage", sharded, None), P("stage", None, None)), jnp.array([1, 1])

  def step(params, total):
    of = weight(mesh, params, each, 1, PartialSum()).load(params).first().open(0).zeros().with_(total=total)
    (of,) = of_all.reduce(of_all.cut_out([of], at, at * 0), at, at * 0)
    assert (of.reduced, list(of.overlapped)) == (name, [name])
    return getattr(of, name)

  shapes = [jax.ShapeDtypeStruct(shape, F32) for shape in ((REPEATS, STAGES, 8, 5), (4, STAGES, 8, 5))]
  assert jax.eval_shape(step, *shapes).shape == (REPEATS if name == "stored" else 2 if sharded else 4, STAGES, 8, 5)

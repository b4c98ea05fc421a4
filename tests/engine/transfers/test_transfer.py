# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Weights gathered in pieces equal the weights, gradients reduced in pieces equal their sum, at any item of a stage."""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from maxtext_pp_ext.engine.gradients import Gradients
from maxtext_pp_ext.engine.programs.partial import Summand
from maxtext_pp_ext.engine.sums import Item
from maxtext_pp_ext.engine.transfers.transfer import Cut, Transfer
from maxtext_pp_ext.engine.weight_layout import WeightLayout
from maxtext_pp_ext.engine.weights import Weights
from maxtext_pp_ext.schedule import Residency
from maxtext_pp_ext.sharding import constrain, gathered_last

REPEATS, STAGES = 4, 2
F32 = jnp.dtype(jnp.float32)

# shape of one stage's weight, how it is stored, and how a stage computes with it
WEIGHTS = {
    "pieces divide": ((8, 5), P("stage", "a", None), P("stage", None, None)),
    "pieces do not divide": ((6, 5), P("stage", "a", None), P("stage", None, None)),
    "fewer rows than pieces": ((4,), P("stage", "a"), P("stage", None)),
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
def _mesh():
  return Mesh(np.array(jax.devices()[:8]).reshape(2, 2, 2), ("stage", "a", "b"))


def layout(stored, gathered, partial_axes=("a", "b")):
  return WeightLayout(
      sharded=gathered_last(stored, gathered),
      gathered=gathered,
      partial_axes=tuple(a for a in partial_axes if a not in jax.tree.leaves(tuple(gathered))),
      compute_dtype=F32,
      accumulation_dtype=F32,
  )


def summand(gradient):
  return Summand(lambda: gradient, ())


@pytest.mark.parametrize("pieces", [3, 4])
@pytest.mark.parametrize("shape, stored, gathered", WEIGHTS.values(), ids=WEIGHTS.keys())
def test_all_pieces_of_a_repeat_are_the_repeat_of_each_stage(mesh, shape, stored, gathered, pieces):
  params = constrain(jax.random.normal(jax.random.key(0), (REPEATS, STAGES, *shape)), P(None, *stored), mesh)
  weights = Weights(residency=Residency.REPEAT, mesh=mesh, layouts=[layout(stored, gathered)], pieces=pieces)
  at, repeat = jnp.array([2, 0]), jnp.array([3, 1])  # each stage is at another one

  @jax.jit
  def prefetch(params):
    loaded = weights.load([params])
    window = weights.window(weights.first(loaded), 0, REPEATS)
    for k in range(pieces):
      piece = jnp.array([k, pieces - 1 - k])
      window = weights.place(window, weights.prefetch(window, loaded, repeat, piece), loaded, at, piece)
    before, after = weights.at(window, loaded, at), weights.at(window, loaded, repeat)
    return before[0], after[0], weights.at(window, loaded, jnp.array([2, 1]))[0]

  before, after, half = prefetch(params)
  np.testing.assert_array_equal(after, [params[3, 0], params[1, 1]])
  if weights.first([params]) == [None]:  # read where it is stored
    np.testing.assert_array_equal(before, [params[2, 0], params[0, 1]])
  else:
    np.testing.assert_array_equal(before, params[0])
    np.testing.assert_array_equal(half, [params[0, 0], params[1, 1]])


@pytest.mark.parametrize("pieces", [3, 4])
@pytest.mark.parametrize("partial_axes", [("a", "b"), ("a",), ("b",)])
@pytest.mark.parametrize("shape, stored, gathered", WEIGHTS.values(), ids=WEIGHTS.keys())
def test_pieces_of_a_sum_leave_for_its_repeats_place_where_pieces_of_a_weight_come_in(
    mesh, shape, stored, gathered, partial_axes, pieces
):
  each = layout(stored, gathered, partial_axes)
  if not each.partial_axes:
    pytest.skip("the gradient is complete")
  params = jax.random.normal(jax.random.key(0), (REPEATS, STAGES, *shape))
  parts = 2 ** len(each.partial_axes)
  weights = Weights(residency=Residency.REPEAT, mesh=mesh, layouts=[each], pieces=pieces)
  gradients = Gradients.of(weights, [params], [parts], [range(1 + len(shape))], [None])
  done = jax.random.normal(jax.random.key(1), (parts, STAGES, *shape))
  total = jax.random.normal(jax.random.key(2), (parts, STAGES, *shape))
  finished, repeat, following = jnp.array([3, 2]), jnp.array([2, 1]), jnp.array([1, 0])
  everywhere = jnp.array([True, True])

  @jax.jit
  def reduce(params, done, total):
    loaded = weights.load([params])
    window = weights.window(weights.first(loaded), 0, REPEATS)
    sums, window = gradients.finish_repeat(gradients.zeros()._replace(total=[done]), window, finished, everywhere)
    sums = sums._replace(total=[total])
    for k in range(pieces):
      piece = jnp.array([k, pieces - 1 - k])
      sums, window = gradients.reduce(sums, window, repeat, finished, piece)
      window = weights.place(window, weights.prefetch(window, loaded, following, piece), loaded, repeat, piece)
    return gradients.finish(sums)[0], weights.at(window, loaded, following)[0]

  reduced, slot = reduce(params, done, total)
  expected = np.zeros((REPEATS, STAGES, *shape), np.float32)
  expected[0] = total.sum(0)
  expected[3, 0], expected[2, 1] = done.sum(0)
  np.testing.assert_allclose(reduced, expected, rtol=1e-6, atol=1e-6)
  np.testing.assert_array_equal(slot, [params[1, 0], params[0, 1]])


@pytest.mark.parametrize("shape, stored, gathered", WEIGHTS.values(), ids=WEIGHTS.keys())
def test_a_repeat_in_one_piece_replaces_the_one_before_and_its_gradient_leaves_from_where_it_is_computed(
    mesh, shape, stored, gathered
):
  each = layout(stored, gathered)
  params = constrain(jax.random.normal(jax.random.key(0), (REPEATS, STAGES, *shape)), P(None, *stored), mesh)
  weights = Weights(residency=Residency.REPEAT, mesh=mesh, layouts=[each], pieces=1)
  parts = 2 ** len(each.partial_axes)
  gradients = Gradients.of(weights, [params], [parts], [range(1 + len(shape))], [None])
  totals = jax.random.normal(jax.random.key(1), (2, parts, STAGES, *shape))
  finished, following, piece = jnp.array([2, 3]), jnp.array([3, 1]), jnp.array([0, 0])
  where = jnp.array([True, True])

  @jax.jit
  def step(params, totals):
    loaded = weights.load([params])
    window = weights.window(weights.first(loaded), 0, REPEATS)
    before = weights.at(window, loaded, jnp.array([0, 0]))
    sums = gradients.zeros()
    at = lambda repeat: Item(repeat=repeat, works=where, first=where, finishes=None)
    first = gradients.adder(sums, window, at(finished))(0, summand(totals[0]))
    sums, window = gradients.add(sums, window, [first], at(finished))
    sums, window = gradients.finish_repeat(sums, window, finished, where)
    sums, window = gradients.reduce(sums, window, following, finished, piece)
    window = weights.place(window, weights.prefetch(window, loaded, following, piece), loaded, finished, piece)
    last = gradients.adder(sums, window, at(following * 0))(0, summand(totals[1]))
    sums, window = gradients.add(sums, window, [last], at(following * 0))
    return before[0], weights.at(window, loaded, following)[0], gradients.finish(sums)[0]

  before, after, reduced = step(params, totals)
  np.testing.assert_array_equal(before, params[0])
  np.testing.assert_array_equal(after, [params[3, 0], params[1, 1]])
  expected = np.zeros((REPEATS, STAGES, *shape), np.float32)
  expected[0] = totals[1].sum(0)
  expected[2, 0], expected[3, 1] = totals[0].sum(0)
  np.testing.assert_allclose(reduced, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "axes, shard, pieces, cut",
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
def test_weights_are_cut_where_pieces_are_copied_easily(axes, shard, pieces, cut):
  assert Transfer(axes=axes, shard=shard, pieces=pieces).cut == cut


@pytest.mark.parametrize(
    "devices, steps, asynchronous",
    [
        pytest.param((2, 1), (), True, id="two devices"),
        pytest.param((4, 1), (), False, id="more devices"),
        pytest.param((4, 1), (("fsdp", (2, 2, 1)),), True, id="on the SparseCores"),
        pytest.param((4, 1), (("expert", (4, 1, 1)),), False, id="another axis on the SparseCores"),
    ],
)
def test_gathers_run_beside_compute_over_two_devices_or_on_the_sparsecores(devices, steps, asynchronous):
  transfer = Transfer(axes=(("fsdp",), ()), shard=(8, 128), pieces=1, devices=devices, steps=steps)
  assert transfer.is_asynchronous is asynchronous

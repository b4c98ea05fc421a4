# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""A reduce-scatter in steps, by tiles or along another dimension gives each device its part of the sum."""

import math

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from maxtext_pp_ext.engine.transfers.collectives import sum_scatter
from maxtext_pp_ext.engine.transfers.transfer import Transfer

AXES = ("fsdp", "expert")
# the shape of a summand, the dimension that is scattered, and the order of the dimensions in memory
SCATTERED = {
    "rows in tiles": ((128, 5), 0, (0, 1)),
    "rows in tiles, any order": ((128, 5), 0, None),
    "rows in tiles of a transposed matrix": ((5, 64), 1, (1, 0)),
    "rows in parts of tiles": ((24, 5), 0, (0, 1)),
    "columns": ((5, 64), 1, (0, 1)),
    "rows of several matrices": ((3, 64, 5), 1, (0, 1, 2)),
}


def scatters(shape, dim, order, sizes=(8, 1), slices=None):
  """The scatters of a summand of this shape, within slices in one step."""
  mesh = jax.sharding.AbstractMesh(sizes, AXES)
  scatter = lambda x: sum_scatter(x, AXES, dim, tiled=True, in_steps=False, order=order, slices=slices or {})
  run = jax.shard_map(scatter, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
  (inner,) = [eqn.params["jaxpr"] for eqn in jax.make_jaxpr(run)(np.zeros(shape)).eqns]
  return [eqn for eqn in inner.eqns if eqn.primitive.name == "reduce_scatter"]


# the sizes of the mesh's axes, and over how many slices they go
MESHES = {
    "one axis": ((8, 1), {}),
    "two axes": ((4, 2), {}),
    "an axis over two slices": ((8, 1), {"fsdp": 2}),
    "an axis over slices of one device": ((8, 1), {"fsdp": 8}),
    "two devices on two slices": ((2, 1), {"fsdp": 2}),
    "the first of two axes over slices": ((4, 2), {"fsdp": 2}),
    "the second of two axes over slices": ((2, 4), {"expert": 2}),
}


@pytest.mark.parametrize(("tiled", "in_steps"), [(True, False), (True, True), (False, True)])
@pytest.mark.parametrize("sizes, slices", MESHES.values(), ids=MESHES.keys())
@pytest.mark.parametrize("shape, dim, order", SCATTERED.values(), ids=SCATTERED.keys())
def test_each_device_gets_its_part_of_the_sum(shape, dim, order, sizes, slices, tiled, in_steps):
  mesh = Mesh(np.array(jax.devices()[: math.prod(sizes)]).reshape(sizes), AXES)
  if not tiled:
    shape = (*shape[:dim], mesh.size, *shape[dim + 1 :])
  summands = jax.random.normal(jax.random.key(0), (mesh.size, *shape))

  def scatter(x):
    part = sum_scatter(x[0], AXES, dim, tiled=tiled, in_steps=in_steps, order=order, slices=slices)
    return part if tiled else jnp.expand_dims(part, dim)

  parts = P(*(AXES if k == dim else None for k in range(len(shape))))
  reduced = jax.jit(jax.shard_map(scatter, mesh=mesh, in_specs=P(AXES), out_specs=parts, check_vma=False))(summands)
  np.testing.assert_allclose(reduced, summands.sum(0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("sizes", "slices", "within"),
    [
        ((8, 1), {"fsdp": 2}, [128, 64, 32]),
        ((4, 2), {"fsdp": 2}, [128, 64, 32]),
        ((2, 4), {"expert": 2}, [128, 64, 32]),
    ],
)
def test_between_slices_devices_send_what_is_left_of_the_sum_within_theirs(sizes, slices, within):
  steps = scatters((128, 5), 0, (0, 1), sizes, slices)
  (axis,) = slices
  half = sizes[AXES.index(axis)] // 2
  of_axis = [eqn.params["axis_name"] in (axis, (axis,)) for eqn in steps]
  groups = [eqn.params["axis_index_groups"] or [] for eqn in steps]
  between = [of_axis[k] and any(min(each) < half <= max(each) for each in groups[k]) for k in range(len(steps))]
  assert between[-1] and sum(between) == 1
  assert steps[-1].invars[0].aval.size == within[-1] * 5


@pytest.mark.parametrize(
    "shape, dim, order, tiles", [(*SCATTERED[k], "in tiles" in k) for k in SCATTERED], ids=SCATTERED.keys()
)
def test_only_rows_of_a_matrix_are_scattered_by_tiles(shape, dim, order, tiles):
  assert [eqn.invars[0].aval.ndim for eqn in scatters(shape, dim, order)] == [len(shape) + tiles]


def test_a_transfers_gradient_is_scattered_within_its_slices_first():
  transfer = Transfer(
      axes=(("fsdp",), ()), shard=(16, 5), chunks=1, devices=(8, 1), slices=(("fsdp", 2),), scatters_in_steps=False
  )
  zero, stored = np.int32(0), np.zeros((1, 16, 5))
  reduce = lambda part: transfer.put(transfer.scatter(part, ("fsdp",)), stored, zero, zero)
  mesh = jax.sharding.AbstractMesh((8, 1), AXES)
  run = jax.shard_map(reduce, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
  (inner,) = [eqn.params["jaxpr"] for eqn in jax.make_jaxpr(run)(np.zeros((128, 5))).eqns]
  assert [len(eqn.params["axis_index_groups"][0]) for eqn in inner.eqns if eqn.primitive.name == "reduce_scatter"] == [
      4,
      2,
  ]

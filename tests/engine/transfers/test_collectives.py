# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""A reduce-scatter in steps, by tiles or along another dimension gives each device its part of the sum."""

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from maxtext_pp_ext.engine.transfers.collectives import sum_scatter

DEVICES = 8
# the shape of a summand, the dimension that is scattered, and the order of the dimensions in memory
SCATTERED = {
    "rows in tiles": ((128, 5), 0, (0, 1)),
    "rows in tiles, any order": ((128, 5), 0, None),
    "rows in tiles of a transposed matrix": ((5, 64), 1, (1, 0)),
    "rows in parts of tiles": ((24, 5), 0, (0, 1)),
    "columns": ((5, 64), 1, (0, 1)),
    "rows of several matrices": ((3, 64, 5), 1, (0, 1, 2)),
}


@pytest.mark.parametrize(("in_steps", "slices"), [(False, 1), (True, 1), (True, 2), (False, 4)])
@pytest.mark.parametrize("shape, dim, order", SCATTERED.values(), ids=SCATTERED.keys())
def test_each_device_gets_its_part_of_the_sum(shape, dim, order, in_steps, slices):
  mesh = Mesh(np.array(jax.devices()[:DEVICES]), ("fsdp",))
  summands = jax.random.normal(jax.random.key(0), (DEVICES, *shape))
  scatter = lambda x: sum_scatter(x[0], ("fsdp",), dim, tiled=True, in_steps=in_steps, order=order, slices=slices)
  parts = P(*("fsdp" if k == dim else None for k in range(len(shape))))
  reduced = jax.jit(jax.shard_map(scatter, mesh=mesh, in_specs=P("fsdp"), out_specs=parts, check_vma=False))(summands)
  np.testing.assert_allclose(reduced, summands.sum(0), rtol=1e-5, atol=1e-5)


def test_between_slices_devices_send_what_is_left_of_the_sum_within_theirs():
  mesh = jax.sharding.AbstractMesh((DEVICES,), ("fsdp",))
  scatter = lambda x: sum_scatter(x, ("fsdp",), 0, tiled=True, in_steps=True, order=(0, 1), slices=2)
  program = jax.make_jaxpr(jax.shard_map(scatter, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False))(
      np.zeros((128, 5))
  )
  (inner,) = [eqn.params["jaxpr"] for eqn in program.eqns]
  steps = [eqn for eqn in inner.eqns if eqn.primitive.name == "reduce_scatter"]
  in_two_slices = [any(min(each) < 4 <= max(each) for each in eqn.params["axis_index_groups"]) for eqn in steps]
  assert in_two_slices == [False, False, True]
  assert [eqn.invars[0].aval.size for eqn in steps] == [128 * 5, 64 * 5, 32 * 5]


@pytest.mark.parametrize("shape, dim, order, tiles", [(*SCATTERED[k], "in tiles" in k) for k in SCATTERED], ids=SCATTERED)
def test_only_rows_of_a_matrix_are_scattered_by_tiles(shape, dim, order, tiles):
  mesh = jax.sharding.AbstractMesh((DEVICES,), ("fsdp",))
  scatter = lambda x: sum_scatter(x, ("fsdp",), dim, tiled=True, in_steps=False, order=order)
  program = jax.make_jaxpr(jax.shard_map(scatter, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False))(
      np.zeros(shape)
  )
  (inner,) = [eqn.params["jaxpr"] for eqn in program.eqns]
  scattered = [eqn.invars[0].aval.ndim for eqn in inner.eqns if eqn.primitive.name == "reduce_scatter"]
  assert scattered == [len(shape) + tiles]

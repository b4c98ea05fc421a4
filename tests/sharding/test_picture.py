# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Compares pictures of shardings with the places where JAX puts the parts."""

import hypothesis
from hypothesis import strategies as st
import jax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np

from maxtext_pp_ext.sharding import picture
from maxtext_pp_ext.sharding.explain import parts
from tests.sharding.common import mesh_of

SPECS = st.permutations(["x", "y", "z"]).flatmap(
    lambda axes: st.sampled_from(
        [
            P(*axes),
            P(tuple(axes), None, None),
            P(None, (axes[0], axes[1]), axes[2]),
            P(axes[0]),
            P(None, None, (axes[1], axes[0])),
            P(),
        ]
    )
)


@hypothesis.given(spec=SPECS)
@hypothesis.settings(max_examples=40)
def test_each_device_has_the_part_that_jax_gives_it(spec):
  mesh = jax.make_mesh((2, 2, 2), ("x", "y", "z"), axis_types=(AxisType.Auto,) * 3)
  sharding = NamedSharding(mesh, spec)
  shape = (8, 8, 8)
  expected = sharding.devices_indices_map(shape)
  shard = sharding.shard_shape(shape)
  for device, part in zip(mesh.devices.flat, parts(sharding, 3), strict=True):
    starts = [(index.start or 0) // size for index, size in zip(expected[device], shard, strict=True)]
    assert starts == list(part)


def test_a_table_of_two_dimensions():
  drawn = picture((8, 32, 4), NamedSharding(mesh_of(data=2, fsdp=2, tensor=2), P("fsdp", "tensor")))
  assert drawn.splitlines() == [
      "[8, 32, 4]: rows along dimension 0; columns along dimension 1; cells: devices",
      "+-----+------+-------+",
      "|     | 0:16 | 16:32 |",
      "+-----+------+-------+",
      "| 0:4 | 0 4  |  1 5  |",
      "+-----+------+-------+",
      "| 4:8 | 2 6  |  3 7  |",
      "+-----+------+-------+",
  ]


def test_one_dimension_none_and_three():
  mesh = mesh_of(data=2, fsdp=2, tensor=2)
  one = picture((8, 4), NamedSharding(mesh, P(None, "data")))
  assert "rows along dimension 1;" in one and "| 0:2 | 0-3 |" in one and "| 2:4 | 4-7 |" in one
  for shape in ((), (5,)):
    assert "replicated" in picture(shape, NamedSharding(mesh, P())) and "0-7" in picture(shape, NamedSharding(mesh, P()))
  three = picture((8, 4, 2), NamedSharding(mesh, P("data", "fsdp", "tensor")))
  assert "the first part along dimension 2" in three
  assert [c for c in "01234567" if f" {c} " in three.split("devices")[1]] == ["0", "2", "4", "6"]


def test_a_long_edge_and_many_devices_are_shortened():
  drawn = picture((64, 4), NamedSharding(mesh_of(a=16, b=4), P("a")))
  assert drawn.count("…") == 2 and "28:32" in drawn and "32:36" not in drawn
  many = picture((4,), NamedSharding(mesh_of(a=16, b=2), P("b")))
  assert "0 2 4 …" in many
  assert np.unique([len(line) for line in many.splitlines()[1:]]).size == 1

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Whether JAX can lay a mesh out on the chips of a topology, and what is said where it cannot."""

import types

import pytest

from maxtext_pp_ext.host import topology
from maxtext_pp_ext.host.models import abstract_model, run_config

# Topology, devices of each mesh axis, whether each of them gets whole axes of the torus.
MESHES = [
    ("v5p-64", (4, 8), True),  # 2 × 4 × 4 chips
    ("v5p-64", (2, 16), True),
    ("v5p-64", (2, 8, 2), False),
    ("v5p-64", (16, 2), True),
    ("v5p-1024", (4, 16, 8), False),  # 8 × 8 × 8
    ("v6e-256", (16, 16), True),
    ("v6e-256", (2, 128), False),
    ("v6e-8", (2, 4), True),
    ("v5e-8", (8,), True),
    ("tpu7x-64", (4, 16), True),  # 2 × 4 × 4 chips of two devices
]


@pytest.mark.parametrize("name, sizes, fits", MESHES)
def test_a_mesh_axis_gets_whole_axes_of_the_torus_or_parts_of_them(name, sizes, fits):
  config = types.SimpleNamespace(compile_topology=name, custom_mesh="")
  assert topology.can_lay_out(config, sizes, splits=False) == fits
  assert topology.can_lay_out(config, sizes, splits=True)


@pytest.mark.parametrize("name, custom", [("", ""), ("a3", ""), ("v5p-64", "hybrid_ring_64x4")])
def test_where_the_torus_is_not_known_nothing_is_refused(name, custom):
  assert topology.can_lay_out(types.SimpleNamespace(compile_topology=name, custom_mesh=custom), (2, 8, 2), splits=False)


def test_the_error_names_the_axes_the_chips_and_the_key(installed):
  keys = (
      "ici_pipeline_parallelism=2",
      "ici_fsdp_parallelism=8",
      "ici_tensor_parallelism=2",
      "pipeline_impl=circular_bsw",
  )
  config = run_config.read_without_run(
      ["compile_topology=v5p-64", "compile_topology_num_slices=1", "base_num_decoder_layers=4", *keys]
  )
  expected = (
      "JAX cannot lay a mesh of stage 2, fsdp 8, tensor 2 out on the 2 × 4 × 4 chips of compile_topology=v5p-64, with "
      "allow_split_physical_axes=False. Set allow_split_physical_axes=True."
  )
  with pytest.raises(ValueError) as found:
    abstract_model.abstract_mesh(config)
  assert str(found.value) == expected

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Whether a mesh divides axes of the torus of a topology, and what is said where it does without the key for it."""

import types

import pytest

from maxtext_pp_ext.host import topology
from maxtext_pp_ext.host.models import abstract_model, run_config

# Topology, devices of each mesh axis, whether these divide axes of the torus.
MESHES = [
    ("v5p-64", (4, 8), False),  # 2 × 4 × 4 chips
    ("v5p-64", (2, 16), False),
    ("v5p-64", (2, 8, 2), True),
    ("v5p-64", (16, 2), False),
    ("v5p-1024", (4, 16, 8), True),  # 8 × 8 × 8
    ("v6e-256", (16, 16), False),
    ("v6e-256", (2, 128), True),
    ("v6e-8", (2, 4), False),
    ("v5e-8", (8,), False),
    ("tpu7x-64", (4, 16), False),  # 2 × 4 × 4 chips of two devices
]


def config_of(name, **keys):
  return types.SimpleNamespace(
      **{"compile_topology": name, "custom_mesh": "", "num_slices": 1, "allow_split_physical_axes": False} | keys
  )


@pytest.mark.parametrize("name, sizes, divides", MESHES)
def test_a_mesh_axis_gets_whole_axes_of_the_torus_or_divides_them(name, sizes, divides):
  assert topology.divides_axes(config_of(name), sizes) == divides
  # MaxText lays each slice out by itself.
  assert topology.divides_axes(config_of(name, num_slices=2), sizes) == divides


CUSTOM = {"custom_mesh": "hybrid_ring_64x4"}
UNKNOWN = [("", {}), ("a3", {}), ("v5p-64", {**CUSTOM, "num_slices": 2})]


@pytest.mark.parametrize("name, keys", UNKNOWN)
def test_where_the_torus_is_not_known_or_the_order_is_maxtexts_own_no_axis_is_divided(name, keys):
  assert not topology.divides_axes(config_of(name, **keys), (2, 8, 2))


def test_an_order_of_maxtexts_own_that_it_does_not_read_changes_nothing():
  assert topology.divides_axes(config_of("v5p-64", **CUSTOM), (2, 8, 2))


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
      "JAX cannot lay a mesh of stage 2, fsdp 8, tensor 2 within a slice out on the 2 × 4 × 4 chips of "
      "compile_topology=v5p-64 with allow_split_physical_axes=False: each mesh axis needs whole axes of the torus. Set "
      "allow_split_physical_axes=True."
  )
  with pytest.raises(ValueError) as found:
    abstract_model.abstract_mesh(config)
  assert str(found.value) == expected


def test_chips_of_two_devices_are_told():
  assert topology.chips("tpu7x-64") == "2 × 4 × 4 chips of 2 devices each"

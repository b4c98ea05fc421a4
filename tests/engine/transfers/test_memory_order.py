# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The order in which parameters are kept is the one that the TPU compiler chose."""

import types
from unittest import mock

import jax
from jax.sharding import Mesh
import numpy as np
import pytest

from maxtext_pp_ext.engine.transfers.memory_order import as_stored, matrix_unit

# Of inputs [R, 1, …] of a program that libtpu 0.0.48.1 compiled for a v5p, in float32 and in bfloat16 alike.
CHOSEN = {
    (5120,): (0,),
    (448, 2048): (0, 1),
    (2048, 448): (1, 0),
    (448, 576): (0, 1),
    (320, 200): (1, 0),
    (200, 320): (0, 1),
    (5120, 16): (1, 0),
    (40, 2880): (0, 1),
    (5120, 40, 128): (0, 1, 2),
    (5120, 8, 64): (1, 2, 0),
    (8192, 2, 128): (0, 1, 2),
    (4, 5, 200): (1, 0, 2),
    (16, 192, 96): (0, 1, 2),
    (1536, 128, 192): (0, 2, 1),
    (96, 128, 192): (0, 2, 1),
    (640, 64, 12): (2, 1, 0),
    (90, 2880, 2880): (0, 1, 2),
}


@pytest.mark.parametrize("shape, order", CHOSEN.items(), ids=map(str, CHOSEN))
def test_a_parameter_is_kept_in_the_order_with_least_padding(shape, order):
  assert as_stored(shape) == order


@pytest.mark.parametrize(("kind", "columns"), [("TPU v5", 128), ("TPU v6 lite", 256), ("TPU of tomorrow", None)])
def test_a_matrix_unit_is_that_of_the_meshs_devices(kind, columns):
  mesh = mock.create_autospec(Mesh, instance=True)
  mesh.devices = np.array([types.SimpleNamespace(device_kind=kind)])
  assert matrix_unit(mesh) == columns
  assert matrix_unit(jax.sharding.AbstractMesh((2,), ("fsdp",))) is None

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""How the buffers of a pipeline's activations and residuals are laid out."""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from maxtext_pp_ext.engine.ring import Ring
from maxtext_pp_ext.schedule import CircularSchedule

ITERATIONS, DEVICES = 5, 4


def laid_out(stages, devices_axis):
  """The shape that each device has of a buffer [T, stages or devices, 3]."""
  mesh = Mesh(np.array(jax.devices()[:DEVICES]).reshape(stages, -1), ("stage", "fsdp"))
  schedule = CircularSchedule(stages=stages, microbatches=4, repeats=1)
  ring = Ring(schedule=schedule, mesh=mesh, activation_spec=P("fsdp"))
  axes, size = (("stage", "fsdp"), DEVICES) if devices_axis else (None, stages)
  buffer = jax.device_put(jnp.zeros((ITERATIONS, size, 3)), NamedSharding(mesh, P(None, axes)))
  result = jax.jit(ring.constrain_iterations)(buffer)
  return result.sharding.shard_shape(result.shape)


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("devices_axis", [False, True], ids=["stages", "devices"])
def test_a_residual_lies_on_the_devices_that_computed_it(stages, devices_axis):
  """A kernel's residual, such as the logarithms of attention's sums, has an axis of all devices: none holds it whole."""
  assert laid_out(stages, devices_axis) == (ITERATIONS, 1, 3)

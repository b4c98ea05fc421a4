# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Abstract meshes, and variables without values."""

from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType


def mesh_of(**sizes):
  """An abstract mesh with automatic sharding."""
  return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def param(shape, names=None, **metadata):
  """An nnx.Param without a value."""
  if names is not None:
    metadata["out_sharding"] = names
  return nnx.Param(jax.ShapeDtypeStruct(shape, jnp.float32), eager_sharding=False, **metadata)

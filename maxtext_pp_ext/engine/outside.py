# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Weights that every stage uses outside of the pipeline, on its own rows, such as those of the logits.

Each stage gets a copy. So the gradient of a copy is that of the stage's rows, and their sum over the stages is left to
the pipeline: each iteration of backward adds up one part. Over slices this sum takes long, and after backward nothing is
left to compute beside it.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from maxtext_pp_ext.engine.ring import Ring, STAGE_AXIS
from maxtext_pp_ext.hardware.tiles import LANES
from maxtext_pp_ext.sharding import constrain


class Outside(NamedTuple):
  """A weight outside of the pipeline, the same on all stages."""

  weight: jax.Array  # [*dims]
  spec: P  # its layout, without the mesh axis of the stages


class OfCopies(NamedTuple):
  """Gradients of the stages' copies of a weight."""

  gradients: jax.Array  # [S, *dims]
  spec: P  # the layout of their sum

  def nothing(self, ring: Ring) -> jax.Array:
    """Their sum before its first part: any value, [*dims]."""
    return constrain(jax.lax.empty(self.gradients.shape[1:], self.gradients.dtype), self.spec, ring.mesh)

  @jax.named_scope("outside")
  def add_part(self, ring: Ring, t: jax.Array | int, total: jax.Array) -> jax.Array:
    """The sum, as far as it is known, [*dims], with iteration t's part.

    Backward begins with the last iteration. The parts of all iterations are the whole. Those of the first ones may be the
    same part again.
    """
    number = ring.schedule.iterations - 1 - jnp.asarray(t)

    def add(number, own, total):
      dim, size = _part(total.shape, ring.schedule.iterations)
      first = jnp.minimum(number * size, total.shape[dim] - size)
      part = jax.lax.psum(jax.lax.dynamic_slice_in_dim(own[0], first, size, dim), STAGE_AXIS)
      return jax.lax.dynamic_update_slice_in_dim(total, part, first, dim)

    specs = P(), P(STAGE_AXIS, *self.spec), self.spec
    summed = jax.shard_map(add, mesh=ring.mesh, in_specs=specs, out_specs=self.spec, check_vma=False)
    return summed(number, self.gradients, total)


def copies(ring: Ring, weight: jax.Array, spec: P) -> jax.Array:
  """[*dims] -> [S, *dims]: each stage's copy."""
  stages = ring.schedule.stages
  return constrain(jnp.broadcast_to(weight, (stages, *weight.shape)), P(STAGE_AXIS, *spec), ring.mesh)


def _part(shape: tuple[int, ...], iterations: int) -> tuple[int, int]:
  """(the dimension that is divided into parts, the size of a part): those with which iterations send least.

  Of the last dimension a part has whole lanes, which are copied fastest.
  """
  lanes = lambda dim: LANES if dim == len(shape) - 1 else 1
  size = lambda dim: min(math.ceil(shape[dim] / iterations / lanes(dim)) * lanes(dim), shape[dim])
  dim = min(range(len(shape)), key=lambda dim: size(dim) / shape[dim])
  return dim, size(dim)

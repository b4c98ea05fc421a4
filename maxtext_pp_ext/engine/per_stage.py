# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs a function on each stage separately: stages are at different items, so each has its own indices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from maxtext_pp_ext.sharding import constrain


class Layout(NamedTuple):
  """A PartitionSpec, and the number of the array dimension that numbers the stages."""

  spec: P
  stages: int


def per_stage(
    fn: Callable[..., Sequence[jax.Array]],
    mesh: Mesh,
    indices: Sequence[jax.Array],
    args: Sequence[jax.Array],
    layouts: Sequence[Layout],
    results: Sequence[Layout],
) -> list[jax.Array]:
  """Runs `fn(*indices, *args)` on each device's arrays, for each stage separately.

  Args:
    fn: (arrays of one stage on one device, without the stages' dimension) -> the same. May communicate over mesh axes
      other than `stage`.
    mesh: the device mesh.
    indices: arrays [S], one number for each stage.
    args: arrays with a stages' dimension.
    layouts: the layouts of the arguments.
    results: the layouts of the results.
  """
  stage = layouts[0].spec[layouts[0].stages]
  args, layouts = [*indices, *args], [*(Layout(P(stage), 0) for _ in indices), *layouts]
  dims, result_dims = [each.stages for each in layouts], [each.stages for each in results]

  def body(*local):
    if all(x.shape[dim] == 1 for x, dim in zip(local, dims, strict=True)):
      out = fn(*(jnp.squeeze(x, dim) for x, dim in zip(local, dims, strict=True)))
      return [jnp.expand_dims(x, dim) for x, dim in zip(out, result_dims, strict=True)]
    return jax.vmap(lambda *a: list(fn(*a)), in_axes=dims, out_axes=result_dims)(*local)

  args = [constrain(x, layout.spec, mesh) for x, layout in zip(args, layouts, strict=True)]
  specs = [each.spec for each in layouts]
  return jax.shard_map(
      body, mesh=mesh, in_specs=tuple(specs), out_specs=[each.spec for each in results], check_vma=False
  )(*args)

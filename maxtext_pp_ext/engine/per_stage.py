# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs a function on each stage separately: stages are at different items, so each has its own indices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

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
    fn: Callable[..., Sequence[Any]],
    mesh: Mesh,
    indices: Sequence[jax.Array],
    args: Sequence[Any],
    layouts: Sequence[Any],
    results: Sequence[Any],
) -> list[Any]:
  """Runs `fn(*indices, *args)` on each device's arrays, for each stage separately.

  Args:
    fn: (arrays of one stage on one device, without the stages' dimension) -> the same. May communicate over mesh axes
      other than `stage`.
    mesh: the device mesh.
    indices: arrays [S], one number for each stage.
    args: arrays with a stages' dimension, or tuples of them.
    layouts: the layouts of the arguments, in the same structure.
    results: the layouts of the results, in theirs.
  """
  is_layout = lambda x: isinstance(x, Layout)
  flat_layouts = jax.tree.leaves(list(layouts), is_leaf=is_layout)
  flat_results, structure = jax.tree.flatten(list(results), is_leaf=is_layout)
  stage = flat_layouts[0].spec[flat_layouts[0].stages]
  args, args_structure = jax.tree.flatten([*indices, *args])
  flat_layouts = [*(Layout(P(stage), 0) for _ in indices), *flat_layouts]
  dims, result_dims = [each.stages for each in flat_layouts], [each.stages for each in flat_results]
  run = lambda *leaves: jax.tree.leaves(list(fn(*jax.tree.unflatten(args_structure, leaves))))

  def body(*local):
    if all(x.shape[dim] == 1 for x, dim in zip(local, dims, strict=True)):
      out = run(*(jnp.squeeze(x, dim) for x, dim in zip(local, dims, strict=True)))
      return [jnp.expand_dims(x, dim) for x, dim in zip(out, result_dims, strict=True)]
    return jax.vmap(run, in_axes=dims, out_axes=result_dims)(*local)

  args = [constrain(x, layout.spec, mesh) for x, layout in zip(args, flat_layouts, strict=True)]
  in_specs, out_specs = tuple(each.spec for each in flat_layouts), [each.spec for each in flat_results]
  out = jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)(*args)
  return jax.tree.unflatten(structure, out)

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs a function on each stage separately: stages are at different items, so each has its own indices."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from maxtext_pp_ext.engine.shapes import Mask, Numbers
from maxtext_pp_ext.sharding import constrain


class Layout(NamedTuple):
  """A PartitionSpec, and the number of the array dimension that numbers the stages."""

  spec: P
  stages: int


class OnStage(NamedTuple):
  """What is computed of one weight on each stage."""

  # (indices of the stage, arrays of one stage on one device, without the stages' dimension) -> one of these. May
  # communicate over mesh axes other than `stage`.
  fn: Callable[..., jax.Array]
  args: Sequence[jax.Array]  # arrays with a stages' dimension
  layouts: Sequence[Layout]  # the layouts of the arguments
  result: Layout  # the layout of the result


def together(
    mesh: Mesh, indices: Sequence[Numbers], each: Sequence[OnStage | None], where: Mask | None = None
) -> list[jax.Array | None]:
  """The results of several weights, computed in one `shard_map`; None for None.

  Args:
    mesh: the device mesh.
    indices: one number for each stage.
    each: what is computed of each weight.
    where: the stages that compute. On the others each result is the last argument, as it is.
  """
  computed = [one for one in each if one is not None]
  if not computed:
    return [None] * len(each)
  most = max(len(one.args) for one in computed)
  # All first arguments, then all second ones, as loops carry them: the compiler's choices depend on the order.
  order = [(k, at) for at in range(most) for k, one in enumerate(computed) if at < len(one.args)]

  def run(*local):
    numbers, arrays = local[: len(indices)], dict(zip(order, local[len(indices) :], strict=False))
    given = [[arrays[k, at] for at in range(len(one.args))] for k, one in enumerate(computed)]
    compute = lambda given: [one.fn(*numbers, *given[k]) for k, one in enumerate(computed)]
    # A `cond` instead of a `where` copies nothing on stages that do not compute.
    as_it_is = lambda given: [args[-1] for args in given]
    return compute(given) if where is None else jax.lax.cond(local[-1], compute, as_it_is, given)

  args, layouts = [computed[k].args[at] for k, at in order], [computed[k].layouts[at] for k, at in order]
  if where is not None:
    args, layouts = [*args, where], [*layouts, Layout(P(layouts[0].spec[layouts[0].stages]), 0)]
  results = iter(per_stage(run, mesh, indices, args, layouts, [one.result for one in computed]))
  return [None if one is None else next(results) for one in each]


def per_stage(
    fn: Callable[..., Sequence[jax.Array]],
    mesh: Mesh,
    indices: Sequence[jax.Array],
    args: Sequence[jax.Array],
    layouts: Sequence[Layout],
    results: Sequence[Layout],
) -> list[jax.Array]:
  """Runs `fn(*indices, *args)` on each device's arrays, for each stage separately; as `OnStage`, with several results."""
  stage = layouts[0].spec[layouts[0].stages]
  args, layouts = [*indices, *args], [*(Layout(P(stage), 0) for _ in indices), *layouts]
  dims, result_dims = [each.stages for each in layouts], [each.stages for each in results]

  def body(*local):
    if all(x.shape[dims[k]] == 1 for k, x in enumerate(local)):
      out = fn(*(jnp.squeeze(x, dims[k]) for k, x in enumerate(local)))
      return [jnp.expand_dims(x, result_dims[k]) for k, x in enumerate(out)]
    return jax.vmap(lambda *a: list(fn(*a)), in_axes=dims, out_axes=result_dims)(*local)

  args = [constrain(x, layouts[k].spec, mesh) for k, x in enumerate(args)]
  specs = [each.spec for each in layouts]
  return jax.shard_map(
      body, mesh=mesh, in_specs=tuple(specs), out_specs=[each.spec for each in results], check_vma=False
  )(*args)

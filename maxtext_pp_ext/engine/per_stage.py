# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs a function on each stage separately: stages are at different items, so each has its own indices."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Self

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


class OnDevices(NamedTuple):
  """A function of each device's arrays. Devices run it in a `shard_map`: one of its own, or another one."""

  fn: Callable[..., Sequence[jax.Array]]  # (indices, arrays) of a device -> arrays
  indices: Sequence[Numbers]  # one number for each stage
  args: Sequence[jax.Array]
  specs: Sequence[P]  # those of indices and arrays
  results: Sequence[P]

  @classmethod
  def per_stage(
      cls,
      fn: Callable[..., Sequence[jax.Array]],
      mesh: Mesh,
      indices: Sequence[jax.Array],
      args: Sequence[jax.Array],
      layouts: Sequence[Layout],
      results: Sequence[Layout],
  ) -> Self:
    """`fn(*indices, *args)` for each stage separately; as `OnStage`, with several results."""
    stage = layouts[0].spec[layouts[0].stages]
    all_, result_dims = [*(Layout(P(stage), 0) for _ in indices), *layouts], [each.stages for each in results]
    dims = [each.stages for each in all_]

    def on_device(*local):
      if all(x.shape[dims[k]] == 1 for k, x in enumerate(local)):
        out = fn(*(jnp.squeeze(x, dims[k]) for k, x in enumerate(local)))
        return [jnp.expand_dims(x, result_dims[k]) for k, x in enumerate(out)]
      return jax.vmap(lambda *a: list(fn(*a)), in_axes=dims, out_axes=result_dims)(*local)

    laid_out = [constrain(x, each.spec, mesh) for x, each in zip([*indices, *args], all_, strict=True)]
    count = len(indices)
    return cls(on_device, laid_out[:count], laid_out[count:], [e.spec for e in all_], [e.spec for e in results])

  @classmethod
  def unchanged(cls, arrays: Sequence[jax.Array], layouts: Sequence[Layout]) -> Self:
    """These arrays, as they are."""
    specs = [each.spec for each in layouts]
    return cls(lambda *local: local, [], arrays, specs, specs)

  def run(self, mesh: Mesh) -> list[jax.Array]:
    """The results, from a `shard_map` of its own."""
    mapped = jax.shard_map(self.fn, mesh=mesh, in_specs=tuple(self.specs), out_specs=list(self.results), check_vma=False)
    return list(mapped(*self.indices, *self.args))


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
  computed = joined(mesh, indices, each, where)
  results = iter([] if computed is None else computed.run(mesh))
  return [None if one is None else next(results) for one in each]


def joined(
    mesh: Mesh, indices: Sequence[Numbers], each: Sequence[OnStage | None], where: Mask | None = None
) -> OnDevices | None:
  """What `together` runs, which has no results for None; None if nothing is computed."""
  computed = [one for one in each if one is not None]
  if not computed:
    return None
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
  return OnDevices.per_stage(run, mesh, indices, args, layouts, [one.result for one in computed])

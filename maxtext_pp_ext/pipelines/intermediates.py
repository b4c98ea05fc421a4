# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""What layers sow while they run, from pipeline iterations back to layers.

An unpipelined decoder sows one value per layer and batch. A pipeline sees the batch as M microbatches, so each layer
sows M values. They are combined by the meaning that their name has in MaxText (`host.models.sown`), to what the layer
would sow for the whole batch. A name that is not listed keeps a microbatch axis, so that nothing is averaged that must
not be.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from maxtext_pp_ext.host.models.sown import COMBINE, DEVIATION, MEAN, SOWN
from maxtext_pp_ext.schedule import Schedule

PyTree = Any


def per_layer(intermediates: PyTree, schedule: Schedule) -> PyTree:
  """Values per layer from values per iteration, without bubbles.

  Args:
    intermediates: leaves [T, S, …], one value per iteration and stage.
    schedule: the pipeline's schedule.

  Returns:
    Leaves [R, S, …], or [R, S, M, …] for names without a rule; the repeat axis is left out where there is one repeat,
    as in the parameters.
  """

  values = per_microbatch(intermediates, schedule)
  by_path = dict(jax.tree_util.tree_leaves_with_path(values))

  def one(path, x):
    if _name(path) == DEVIATION:
      x = deviation(x, by_path.get(_renamed(path, MEAN)), axis=2)
    elif (combine := COMBINE.get(_name(path))) is not None:
      x = combine(x, axis=2)
    return x if schedule.repeats > 1 else x[0]

  return jax.tree_util.tree_map_with_path(one, values)


def deviation(deviations: jax.Array, means: jax.Array | None, axis: int) -> jax.Array:
  """The standard deviation of equally large parts together: √(mean of variances + variance of means).

  Args:
    deviations: of the parts, without Bessel's correction.
    means: of the parts.
    axis: on which parts stand.

  Raises:
    NotImplementedError: there are no such means.
  """
  if means is None or means.shape != deviations.shape:
    raise NotImplementedError(
        f"A pipelined stage sows {DEVIATION} of a microbatch without {MEAN} of the same values beside it, both of which"
        f" make {DEVIATION} of the batch. Sow {MEAN}, too, or {DEVIATION} under another name, which keeps an axis of"
        " microbatches."
    )
  wide = lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32))
  variance = jnp.mean(jnp.square(wide(deviations)), axis=axis) + jnp.var(wide(means), axis=axis)
  return jnp.sqrt(variance).astype(deviations.dtype)


def put_before(layers: nnx.Module, earlier: nnx.State, appends: Mapping[tuple, bool]) -> None:
  """Gives stacked layers what calls before the last one have left in them, as if they had held it during that call.

  Args:
    layers: the stacked stages, with what the last call has left.
    earlier: what was popped from them before that call.
    appends: by path, whether that call appends to it; False: it overwrites it. Other paths are those it leaves alone.
  """
  last = dict(nnx.to_flat_state(nnx.state(layers, SOWN)))
  kept = {}
  for path, variable in nnx.to_flat_state(earlier):
    if path not in last:
      kept[path] = variable
    elif appends[path]:
      kept[path] = variable.replace((*variable.get_value(), *last[path].get_value()))
  nnx.pop(layers, lambda path, _: path in kept)  # an update would want as many values as before
  nnx.update(layers, nnx.from_flat_state(list(kept.items())))


def per_microbatch(values: PyTree, schedule: Schedule) -> PyTree:
  """Leaves [R, S, M, …] from leaves [T, S, …]: one value per layer and microbatch, without bubbles."""
  repeat, stage, microbatch = jnp.ogrid[: schedule.repeats, : schedule.stages, : schedule.microbatches]
  t = schedule.iteration(repeat, microbatch, stage)
  return jax.tree.map(lambda x: x[t, stage], values)


def _name(path: tuple) -> str:
  """The name a value was sown under: the last string of its path (what follows are a tuple's index or `value`)."""
  keys = [k.key for k in path if isinstance(k, jax.tree_util.DictKey) and isinstance(k.key, str)]
  return keys[-1] if keys else ""


def _renamed(path: tuple, name: str) -> tuple:
  """The path of what was sown beside, under another name."""
  last = max(i for i, k in enumerate(path) if isinstance(k, jax.tree_util.DictKey) and isinstance(k.key, str))
  return (*path[:last], jax.tree_util.DictKey(name), *path[last + 1 :])

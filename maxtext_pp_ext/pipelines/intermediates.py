# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Maps values that layers sow from pipeline iterations back to layers.

An unpipelined decoder sows one value per layer and batch. A pipeline splits the batch into M microbatches, so each layer
sows M values. They are combined into the value that the layer would sow for the whole batch, by the meaning of their name
in MaxText (`host.models.sown`). Values with an unlisted name keep a microbatch axis, so that no value is averaged by
mistake.
"""

from collections.abc import Mapping
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from maxtext_pp_ext.host.models.sown import COMBINE, DEVIATION, MEAN, SOWN
from maxtext_pp_ext.schedule import Schedule
from maxtext_pp_ext.schedule.moves import numbers

PyTree = Any


def per_layer(intermediates: PyTree, schedule: Schedule) -> PyTree:
  """Values per layer, without bubbles, from values per iteration and stage, leaves [T, S, …].

  Returns:
    Leaves [R, S, …], or [R, S, M, …] for names without a rule if there are several microbatches.
  """
  values = per_microbatch(intermediates, schedule)
  by_path = dict(jax.tree_util.tree_leaves_with_path(values))

  def one(path, x):
    if schedule.microbatches == 1:
      return x[:, :, 0]
    if _name(path) == DEVIATION:
      x = deviation(x, by_path.get(_renamed(path, MEAN)), axis=2)
    elif (combine := COMBINE.get(_name(path))) is not None:
      x = combine(x, axis=2)
    return x

  return jax.tree_util.tree_map_with_path(one, values)


def deviation(deviations: jax.Array, means: jax.Array | None, axis: int) -> jax.Array:
  """The standard deviation of the union of equally large parts: √(mean of variances + variance of means).

  The parts are along an axis of their standard deviations, without Bessel's correction, and of their means.

  Raises:
    NotImplementedError: there are no means, or they have another shape than the deviations.
  """
  if means is None or means.shape != deviations.shape:
    raise NotImplementedError(
        f"A pipelined stage sows {DEVIATION} of a microbatch without {MEAN} of the same values. Both are needed to"
        f" compute {DEVIATION} of the batch. Sow {MEAN}, too, or sow {DEVIATION} under another name, whose values keep a"
        " microbatch axis."
    )
  wide = lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32))
  variance = jnp.mean(jnp.square(wide(deviations)), axis=axis) + jnp.var(wide(means), axis=axis)
  return jnp.sqrt(variance).astype(deviations.dtype)


def put_before(layers: nnx.Module, earlier: nnx.State, appends: Mapping[tuple, bool]) -> None:
  """Restores values of earlier calls in stacked layers, as if the layers had held them during the last call.

  Args:
    layers: the stacked stages, with the values that the last call has sown.
    earlier: the values that were popped from the stages before that call.
    appends: the result of `StageModule.appends`. Paths that the call does not sow are missing.
  """
  last = dict(nnx.to_flat_state(nnx.state(layers, SOWN)))
  kept = {}
  for path, variable in nnx.to_flat_state(earlier):
    if path not in last:
      kept[path] = variable
    elif appends[path]:
      kept[path] = variable.replace((*variable.get_value(), *last[path].get_value()))
  nnx.pop(layers, lambda path, _: path in kept)  # nnx.update requires the same number of values as before
  nnx.update(layers, nnx.from_flat_state(list(kept.items())))


def per_microbatch(values: PyTree, schedule: Schedule) -> PyTree:
  """Leaves [R, S, M, …] from leaves [T, S, …]: one value per layer and microbatch, without bubbles."""
  repeat, stage, number = np.ogrid[: schedule.repeats, : schedule.stages, : schedule.microbatches]
  t = schedule.iteration(repeat, np.argsort(numbers(schedule))[number], stage)
  return jax.tree.map(lambda x: x[t, stage], values)


def _name(path: tuple) -> str:
  """The name under which a value was sown: the last string of its path, before a tuple's index or `value`."""
  keys = [k.key for k in path if isinstance(k, jax.tree_util.DictKey) and isinstance(k.key, str)]
  return keys[-1] if keys else ""


def _renamed(path: tuple, name: str) -> tuple:
  """The path of a value that the same module sows under another name."""
  last = max(i for i, k in enumerate(path) if isinstance(k, jax.tree_util.DictKey) and isinstance(k.key, str))
  return (*path[:last], jax.tree_util.DictKey(name), *path[last + 1 :])

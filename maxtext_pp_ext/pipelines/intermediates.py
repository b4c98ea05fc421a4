# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""What layers sow while they run (`SOWN`), from pipeline iterations back to layers.

An unpipelined decoder sows one value per layer and batch. A pipeline sees the batch as M microbatches, so each layer
sows M values. They are combined by the meaning that their name has in MaxText; a name that is not listed keeps a
microbatch axis, so that nothing is averaged that must not be.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from maxtext_pp_ext.schedule import CircularSchedule

PyTree = Any

# The loss of DeepSeek's indexer has a type of its own in MaxText 0.2.5, which is no `nnx.Intermediate`.
SOWN = nnx.Any(nnx.Intermediate, lambda _, variable: type(variable).__name__ == "indexer_losses")

# Each takes values and the axis on which those of parts of the batch stand.
COMBINE: dict[str, Callable] = {
    # Means over tokens: microbatches have equally many, so the mean of means is the mean.
    "moe_lb_loss": jnp.mean,
    "indexer_loss": jnp.mean,
    "activation_mean": jnp.mean,
    "activation_stdev": jnp.mean,
    "activation_fraction_zero": jnp.mean,
    # Extremes and flags over tokens.
    "max_logits": jnp.max,
    "moe_required_rbf": jnp.max,
    "moe_max_load_ratio": jnp.max,
    "moe_has_overflow": jnp.any,
    "moe_dropless_fallback": jnp.any,
    # Counts of tokens; see `expert_bias`.
    "moe_bias_updates": jnp.sum,
}


def per_layer(intermediates: PyTree, schedule: CircularSchedule) -> PyTree:
  """Values per layer from values per iteration, without bubbles.

  Args:
    intermediates: leaves [T, S, …], one value per iteration and stage.
    schedule: the pipeline's schedule.

  Returns:
    Leaves [R, S, …], or [R, S, M, …] for names without a rule; the repeat axis is left out where there is one repeat,
    as in the parameters.
  """

  def one(path, x):
    combine = COMBINE.get(_name(path))
    x = x if combine is None else combine(x, axis=2)
    return x if schedule.repeats > 1 else x[0]

  return jax.tree_util.tree_map_with_path(one, per_microbatch(intermediates, schedule))


def per_microbatch(values: PyTree, schedule: CircularSchedule) -> PyTree:
  """Leaves [R, S, M, …] from leaves [T, S, …]: one value per layer and microbatch, without bubbles."""
  repeat, stage, microbatch = jnp.ogrid[: schedule.repeats, : schedule.stages, : schedule.microbatches]
  t = repeat * schedule.microbatches + microbatch + schedule.delay * stage
  return jax.tree.map(lambda x: x[t, stage], values)


def _name(path: tuple) -> str:
  """The name a value was sown under: the last string of its path (what follows are a tuple's index or `value`)."""
  keys = [k.key for k in path if isinstance(k, jax.tree_util.DictKey) and isinstance(k.key, str)]
  return keys[-1] if keys else ""

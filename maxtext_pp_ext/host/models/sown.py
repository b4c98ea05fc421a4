# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Values that MaxText's layers sow, and how values of parts of a batch combine into that of the whole batch.

Parts have equally many rows, and none of the means below leaves out tokens, except the indexer's loss of compressed
attention, which is refused (`host.rules.per_microbatch`). Read in MaxText 0.2.5.

Load balancing of experts without an auxiliary loss (`routed_bias_update_rate`) moves the bias of an expert's router logit
by rate · sign(mean count − count) after each step. The counts are those of tokens that the whole batch sent to each
expert (Wang et al., 2024, https://arxiv.org/abs/2408.15664). Signs of microbatches do not add up to the batch's, but
counts do. So stages sow counts; the pipeline sums them over microbatches, and takes the sign once.
"""

from collections.abc import Callable
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from maxtext_pp_ext.config.view import ConfigView
from maxtext_pp_ext.errors import UnsupportedError

# In MaxText 0.2.5 the loss of DeepSeek's indexer has its own type, which is not an `nnx.Intermediate`.
SOWN = nnx.Any(nnx.Intermediate, lambda _, variable: type(variable).__name__ == "indexer_losses")

# Each takes values and the axis that counts parts of the batch.
COMBINE: dict[str, Callable] = {
    # Means over tokens, or over rows (each row has its own load-balance loss): the mean of means is the mean.
    "moe_lb_loss": jnp.mean,
    "indexer_loss": jnp.mean,
    "activation_mean": jnp.mean,
    "activation_fraction_zero": jnp.mean,
    # Extremes and flags over tokens. Each microbatch fills the buffers of experts: how full the fullest one was.
    "max_logits": jnp.max,
    "moe_required_rbf": jnp.max,
    "moe_max_load_ratio": jnp.max,
    "moe_has_overflow": jnp.any,
    "moe_dropless_fallback": jnp.any,
    # Counts of tokens.
    "moe_bias_updates": jnp.sum,
}

# A standard deviation, and the mean sown beside it: both of all parts give the deviation of the batch.
DEVIATION, MEAN = "activation_stdev", "activation_mean"

_MOVES = "should_update_load_balance"  # the method of MaxText's experts
_NAME = "moe_bias_updates"  # under which MaxText's layers sow updates or counts
# Variables that are neither trained by gradient nor changed by a layer's call.
READ_ONLY_STATE = frozenset({"MoEBiasVar"})


def sow_counts(stage: nnx.Module) -> None:
  """Makes the routed experts of a stage sow counts, int [..., experts], instead of updates."""
  for node in _with_bias(stage):
    # Above 1, MaxText's routed experts do so.
    node.config = ConfigView(node.config, (("gradient_accumulation_steps", 2),))


def _with_bias(layers: nnx.Module) -> list[Any]:
  """The routed experts whose biases move."""
  found = (node for _, node in nnx.iter_graph(layers) if isinstance(node, nnx.Module) and hasattr(node, _MOVES))
  return [node for node in found if getattr(node, _MOVES)()]


def updates_from_counts(layers: nnx.Module, config: Any, axis: int) -> None:
  """Replaces the batch's counts in stacked layers by the updates that MaxText's train step adds to their biases.

  `layers` are the stacked stages, after `StageModule.store_back`. Biases that are parameters are stacked along `axis`.
  Raises NotImplementedError if the train step could not add the updates: it takes one, for the bias of one module.
  """
  balanced = [node for _, node in nnx.iter_graph(layers) if isinstance(node, nnx.Module) and hasattr(node, _NAME)]
  # Of DeepSeek V4 it updates each bias by its path.
  if len(balanced) > 1 and not config.model_name.startswith("deepseek4"):
    raise UnsupportedError(
        f"routed_bias_update_rate={config.routed_bias_update_rate}: a stage has {len(balanced)} layers with experts, and"
        " MaxText's train step updates one. Set scan_layers_per_stage=True, or num_layers_per_pipeline_stage=1."
    )
  for layer in balanced:
    sown = getattr(layer, _NAME)
    bias = _with_bias(layer)[0].gate.bias
    sown.set_value(tuple(_update(counts, bias, config, axis) for counts in sown.get_value()))


def _update(counts: jax.Array, bias: nnx.Variable, config: Any, axis: int) -> jax.Array:
  rate = f"routed_bias_update_rate={config.routed_bias_update_rate}"
  if not jnp.issubdtype(counts.dtype, jnp.integer):
    raise UnsupportedError(
        f"{rate}: the layers of this version of MaxText give updates of microbatches, but the update of a batch needs"
        " counts. Set routed_bias_update_rate=0."
    )
  # Counts are stacked along the first axis. With as many experts as layers, shapes would hide a difference. MaxText
  # 0.2.5 has such biases only in configs that are already refused.
  stacked_otherwise = isinstance(bias, nnx.Param) and axis != 0
  # With defer_small_all_reduces, counts are still in parts here.
  deferred = config.defer_small_all_reduces
  if stacked_otherwise or (not deferred and counts.shape != bias.get_value().shape):
    raise UnsupportedError(
        f"{rate}: the update has the shape {list(counts.shape)}, layers before experts, and the bias"
        f" {list(bias.get_value().shape)}, param_scan_axis={config.param_scan_axis}; MaxText's train step adds them as"
        " they are. Set param_scan_axis=0, or in a pipeline scan_layers_per_stage=False or"
        " num_layers_per_pipeline_stage=1."
    )
  # MaxText itself turns these into updates: counts in parts, and counts that are to be summed over further batches.
  if deferred or config.gradient_accumulation_steps > 1:
    return counts
  from maxtext.layers.moe import load_balance_updates_from_counts  # pylint: disable=import-outside-toplevel

  return load_balance_updates_from_counts(counts, config.num_experts, config.routed_bias_update_rate)

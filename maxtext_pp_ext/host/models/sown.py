# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""What MaxText's layers sow while they run, and what the values of parts of a batch make for the whole batch.

Parts have equally many rows, and none of the means below leaves out padding. Read in MaxText 0.2.5.
"""

from collections.abc import Callable

from flax import nnx
import jax.numpy as jnp

# The loss of DeepSeek's indexer has a type of its own in MaxText 0.2.5, which is no `nnx.Intermediate`.
SOWN = nnx.Any(nnx.Intermediate, lambda _, variable: type(variable).__name__ == "indexer_losses")

# Each takes values and the axis on which those of parts of the batch stand.
COMBINE: dict[str, Callable] = {
    # Means over tokens, and over rows, each of which has a load-balance loss of its own: the mean of means is the mean.
    "moe_lb_loss": jnp.mean,
    "indexer_loss": jnp.mean,
    "activation_mean": jnp.mean,
    "activation_fraction_zero": jnp.mean,
    # Extremes and flags over tokens. Buffers of experts are filled by a microbatch: how full the fullest one was.
    "max_logits": jnp.max,
    "moe_required_rbf": jnp.max,
    "moe_max_load_ratio": jnp.max,
    "moe_has_overflow": jnp.any,
    "moe_dropless_fallback": jnp.any,
    # Counts of tokens; see `expert_bias`.
    "moe_bias_updates": jnp.sum,
}

# A standard deviation, and the mean that is sown beside it: those of parts give that of the batch.
DEVIATION, MEAN = "activation_stdev", "activation_mean"

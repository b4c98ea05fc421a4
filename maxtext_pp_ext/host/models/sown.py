# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Values that MaxText's layers sow, and how values of parts of a batch combine into that of the whole batch.

Parts have equally many rows, and none of the means below leaves out tokens, except the indexer's loss of compressed
attention, which is refused (`host.rules.per_microbatch`). Read in MaxText 0.2.5.
"""

from collections.abc import Callable

from flax import nnx
import jax.numpy as jnp

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
    # Counts of tokens; see `expert_bias`.
    "moe_bias_updates": jnp.sum,
}

# A standard deviation, and the mean sown beside it: both of all parts give the deviation of the batch.
DEVIATION, MEAN = "activation_stdev", "activation_mean"

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Arrays of the engine by their axes.

R repeats, S stages, M microbatches, T iterations; B buffers of a double buffer; F devices, usually those of FSDP, along
the axes over which a gradient is left as a partial sum. `*dims` are the axes of one layer's weight.
"""

import jax
from jaxtyping import Bool, Float, Int, Shaped

# Weights and gradients.
Param = Shaped[jax.Array, "R S *dims"]  # as it is stored
OfRepeat = Shaped[jax.Array, "S *dims"]  # of the repeat that each stage is at
Buffers = Shaped[jax.Array, "B F S *dims"]  # gathered; B is 2: current and next, or 1
Chunk = Shaped[jax.Array, "F S *chunk"]  # of a gathered weight, or of a gradient before its reduction
Accumulator = Shaped[jax.Array, "F S *dims"]

# One number for each stage.
Numbers = Int[jax.Array, "S"]
Mask = Bool[jax.Array, "S"]

# Activations and their cotangents.
Microbatches = Float[jax.Array, "M microbatch sequence embed"]
AtStages = Float[jax.Array, "S microbatch sequence embed"]
Store = Float[jax.Array, "S M microbatch sequence embed"]
Residual = Shaped[jax.Array, "S *dims"]  # what an iteration keeps for backward
PerIteration = Shaped[jax.Array, "T S *dims"]

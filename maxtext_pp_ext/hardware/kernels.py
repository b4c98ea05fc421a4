# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""What Pallas kernels compute, and the share of a chip's peak that they reach."""

ATTENTION, GROUPED_PRODUCT, OTHER = "attention", "grouped product", "other"
# Products of [queries, keys, head dimension] in each kernel of splash attention
# (jax.experimental.pallas.ops.tpu.splash_attention): QKᵀ and PV in forward. Both kernels of backward compute QKᵀ and
# dO Vᵀ.
SPLASH = {"fwd": 2, "dkv": 4, "dq": 3}
SPLASH_FUSED_BACKWARD = 5  # dkv and dq in one kernel
NAMES_OF_ATTENTION = ("splash", "flash_attention")  # words in the names of such kernels
# Shares of the peak. That of grouped products is fitted to two published runs, deepseek2-16b-v5p-8 and
# mixtral-8x7b-v5p-256. Alone they would give 0.79 and 0.93 (`python -m benchmarks.published`). Others are assumptions.
EFFICIENCY = {ATTENTION: 0.5, GROUPED_PRODUCT: 0.85, OTHER: 1.0}

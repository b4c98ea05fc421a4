# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The tiles in which a TPU keeps matrices in memory."""

LANES = 128  # of a vector register; a matrix has its columns in them
SUBLANES = 8  # of a vector register; rows of a tile are a multiple of these, but for tiles of one, two and four rows
# Rows and columns of a tile, by the width of its values. There are also tiles of one, two and four rows.
OF_32_BITS, OF_16_BITS = (SUBLANES, LANES), (2 * SUBLANES, LANES)
# Axis, counted from the last -> what has to divide its shards for the TPU compiler (libtpu 0.0.48.1;
# benchmarks.workarounds reduce_scatter_of_parts_of_tiles) to make reduce-scatters. Of the last axis 320 of Llama 4 Scout,
# 128 of Qwen3 235B and 112 of DeepSeek-V3 are not reduced so, and 512 of Mixtral 8x7B are; of the axis before, 360 of
# gpt-oss-120b are not, and 112 of DeepSeek-V3 are (`python -m benchmarks.compiler_figures --impl none circular`, columns
# reduce-scatter and all-reduce).
REDUCE_SCATTERED = {1: 256, 2: 16}

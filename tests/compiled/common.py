# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""A dense model that the TPU compiler compiles in seconds."""


def keys(topology, *, embed, mlp, layers, sequence, vocabulary, rows_per_device):
  """MaxText's arguments. The compiler's tiles divide the sizes, so that it transfers no padding."""
  return (
      f"compile_topology={topology}",
      f"base_emb_dim={embed}",
      "base_num_query_heads=4",
      "base_num_kv_heads=4",
      f"head_dim={embed // 4}",
      f"base_mlp_dim={mlp}",
      f"base_num_decoder_layers={layers}",
      f"max_target_length={sequence}",
      f"vocab_size={vocabulary}",
      f"per_device_batch_size={rows_per_device}",
      "log_config=False",
  )

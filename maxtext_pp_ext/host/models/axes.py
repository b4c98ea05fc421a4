# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Names of MaxText's logical axes: of activations between layers, and of stacked stages."""

from typing import Any

from maxtext_pp_ext.sharding.resolve import mesh_axes, resolve

ACTIVATION_AXES = ("activation_batch", "activation_length", "activation_embed")
# A mesh axis bound to one of these shards the batch or the sequence that a stage computes on.
DATA_AXES = (
    "activation_batch",
    "activation_length",
    "activation_batch_attn",
    "activation_length_attn",
    "activation_batch_moe",
    "activation_length_moe",
)
STAGE_AXES = ("circular_repeats", "layers")


def data_mesh_axes(mesh: Any, rules: Any) -> set[str]:
  """The mesh axes that shard the batch or the sequence that a stage computes on."""
  return {axis for name in DATA_AXES for axis in mesh_axes(resolve((name,), mesh, rules)[0])}

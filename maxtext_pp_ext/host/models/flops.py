# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""MaxText's own count of floating-point operations, and whether forward's are repeated."""

from typing import Any

from maxtext_pp_ext.config.derived import decoder_block

# Blocks that normalise the MLP's output, whatever use_post_ffw_norm says (maxtext 0.2.5: olmo3.py, gemma4_small.py).
_ALWAYS_WITH_NORM = frozenset({"olmo3", "gemma4_small"})


def of_step(config: Any) -> float:
  """FLOPs of a train step on one device, as MaxText's log reports them: forward and backward, without remat."""
  return _of_device(config)[0] * 1e12


def of_attention(config: Any) -> float:
  """Those of a step that multiply queries with keys, and scores with values."""
  return _of_device(config)[2] * 1e12


def _of_device(config: Any) -> tuple[float, float, float]:
  from maxtext.utils import maxtext_utils  # pylint: disable=import-outside-toplevel

  return maxtext_utils.calculate_tflops_training_per_device(config, log=False)


def has_norm_behind_mlp(config: Any) -> bool:
  """Whether a norm reads the output of the MLP before it is added to the residual stream."""
  return bool(config.use_post_ffw_norm) or decoder_block(config) in _ALWAYS_WITH_NORM


def weighs_experts_inputs(config: Any) -> bool:
  """Whether a router's weights multiply what experts get, and not what they return (maxtext 0.2.5: moe.py)."""
  return decoder_block(config) == "llama4"


def recomputes_layers(config: Any) -> bool:
  """Whether backward recomputes all of a layer from its input."""
  if config.remat_policy != "custom":
    return config.remat_policy == "full"
  return {*(config.tensors_on_device or ()), *(config.tensors_to_offload or ())} <= {"decoder_layer_input"}

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""MaxText's own count of floating-point operations, and whether forward's are repeated."""

from typing import Any


def of_step(config: Any) -> float:
  """FLOPs of a train step on one device, as MaxText's log reports them: forward and backward, without remat."""
  return _of_device(config)[0] * 1e12


def of_attention(config: Any) -> float:
  """Those of a step that multiply queries with keys, and scores with values."""
  return _of_device(config)[2] * 1e12


def _of_device(config: Any) -> tuple[float, float, float]:
  from maxtext.utils import maxtext_utils  # pylint: disable=import-outside-toplevel

  return maxtext_utils.calculate_tflops_training_per_device(config, log=False)


def recomputes_layers(config: Any) -> bool:
  """Whether backward recomputes all of a layer from its input."""
  if config.remat_policy != "custom":
    return config.remat_policy == "full"
  return {*(config.tensors_on_device or ()), *(config.tensors_to_offload or ())} <= {"decoder_layer_input"}

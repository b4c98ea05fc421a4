# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""MaxText's own count of floating-point operations."""

from typing import Any


def of_step(config: Any) -> float:
  """Returns FLOPs of a train step on one device, as MaxText's log reports them: forward and backward, without remat."""
  from maxtext.utils import maxtext_utils  # pylint: disable=import-outside-toplevel

  return maxtext_utils.calculate_tflops_training_per_device(config, log=False)[0] * 1e12


def of_attention(config: Any) -> float:
  """Returns those of a step that multiply queries with keys, and scores with values."""
  from maxtext.utils import maxtext_utils  # pylint: disable=import-outside-toplevel

  return maxtext_utils.calculate_tflops_training_per_device(config, log=False)[2] * 1e12

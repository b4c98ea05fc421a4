# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Circular pipeline with a Buffer Sliding Window: weights of two successive repeats are held gathered."""

from maxtext_pp_ext.pipelines.base import CircularPipelineBase
from maxtext_pp_ext.schedule import GatherPolicy


class CircularBswPipeline(CircularPipelineBase):
  """Circular pipeline with a Buffer Sliding Window; see `CircularPipelineBase`.

  The gathered weights of two successive repeats are held: a window that slides over the buffer of all repeats.
  """

  gather_policy = GatherPolicy.REPEAT

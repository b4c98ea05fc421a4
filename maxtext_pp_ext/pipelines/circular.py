# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The implementations: circular pipelines that differ in their gather policy. See `CircularPipelineBase`."""

from maxtext_pp_ext.pipelines.base import CircularPipelineBase
from maxtext_pp_ext.schedule import GatherPolicy


class CircularPipeline(CircularPipelineBase):
  """Gathers weights at every iteration: least memory, most traffic."""

  gather_policy = GatherPolicy.ITERATION


class CircularBswPipeline(CircularPipelineBase):
  """Holds the gathered weights of two successive repeats: a Buffer Sliding Window over those of all repeats."""

  gather_policy = GatherPolicy.REPEAT


class CircularAllGatherOncePipeline(CircularPipelineBase):
  """Gathers all weights once per step: most memory, least traffic."""

  gather_policy = GatherPolicy.ONCE

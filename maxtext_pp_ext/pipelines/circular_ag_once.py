# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Circular pipeline that gathers all weights once per step: most memory, least traffic."""

from maxtext_pp_ext.pipelines.base import CircularPipelineBase
from maxtext_pp_ext.schedule import GatherPolicy


class CircularAllGatherOncePipeline(CircularPipelineBase):
  """Circular pipeline that gathers all weights once per step: most memory, least traffic. See `CircularPipelineBase`."""

  gather_policy = GatherPolicy.ONCE

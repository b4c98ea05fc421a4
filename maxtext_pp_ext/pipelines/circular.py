# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Circular pipeline that gathers weights at every iteration: least memory, most traffic."""

from maxtext_pp_ext.pipelines.base import CircularPipelineBase
from maxtext_pp_ext.schedule import GatherPolicy


class CircularPipeline(CircularPipelineBase):
  """Circular pipeline that gathers weights at every iteration: least memory, most traffic. See `CircularPipelineBase`."""

  gather_policy = GatherPolicy.ITERATION

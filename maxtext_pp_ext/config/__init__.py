# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The keys of a config: those that this package adds, and values derived from MaxText's own."""

from maxtext_pp_ext.config.keys import PipelineConfigError, PipelineConfigWarning, PipelineKeys

__all__ = ["PipelineConfigError", "PipelineConfigWarning", "PipelineKeys"]

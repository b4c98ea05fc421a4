# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Executes a schedule: stage program, weight gather policy, activation ring, forward and backward loops."""

from maxtext_pp_ext.engine.engine import Checkpoints, Engine
from maxtext_pp_ext.engine.outside import Outside
from maxtext_pp_ext.engine.ring import Ring
from maxtext_pp_ext.engine.weights.layout import MAX, SUM, WeightLayout
from maxtext_pp_ext.schedule import GatherPolicy

__all__ = ["MAX", "SUM", "Checkpoints", "Engine", "GatherPolicy", "Outside", "Ring", "WeightLayout"]

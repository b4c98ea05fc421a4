# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Executes a schedule: stage program, weight residency, activation ring, forward and backward loops."""

from maxtext_pp_ext.engine.engine import Engine
from maxtext_pp_ext.engine.ring import Ring
from maxtext_pp_ext.engine.weights.layout import MAX, SUM, WeightLayout
from maxtext_pp_ext.schedule import Residency

__all__ = ["MAX", "SUM", "Engine", "Residency", "Ring", "WeightLayout"]

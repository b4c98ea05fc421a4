# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Executes a schedule: stage program, weight residency, activation ring, forward and backward loops."""

from maxtext_pp_ext.engine.engine import Engine
from maxtext_pp_ext.engine.residency import MAX, SUM, Residency, WeightLayout, Weights
from maxtext_pp_ext.engine.ring import Ring

__all__ = ["MAX", "SUM", "Engine", "Residency", "Ring", "WeightLayout", "Weights"]

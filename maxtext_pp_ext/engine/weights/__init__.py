# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Weights: one object for each, its layouts, its sums of gradients, and what is done with all at once."""

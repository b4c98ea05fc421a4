# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Draws schedules as text for a terminal, and as SVG or PNG."""

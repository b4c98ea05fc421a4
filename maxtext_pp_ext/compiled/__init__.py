# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Compiles train steps and reads figures off them: memory, traffic, FLOPs, and the compute that overlaps transfers."""

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs MaxText's trainers in separate processes, for the demo, `testing.launch` and tests."""

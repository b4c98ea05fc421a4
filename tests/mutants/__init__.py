# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Deliberate faults, each of which some test has to notice: `python -m tests.mutants`."""

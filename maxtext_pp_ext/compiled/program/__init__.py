# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads compiled programs: text, dependences, branches that run, and what an instruction sends or multiplies."""

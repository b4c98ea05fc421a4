# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Stages as programs (jaxprs): traced, taken apart, rewritten and run."""

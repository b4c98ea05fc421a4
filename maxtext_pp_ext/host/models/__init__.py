# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads MaxText's configs, models and train steps. Callers connect this package with MaxText themselves."""

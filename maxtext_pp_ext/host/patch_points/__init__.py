# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Connects this package with MaxText: what is replaced, where and when, and in which versions of MaxText."""

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Rules that refuse a config: `problems` runs them all; each module holds the rules of one subject."""

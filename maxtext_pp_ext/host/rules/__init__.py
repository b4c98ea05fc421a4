# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Where a config is refused: `problems` has all rules, each in the module of its subject."""

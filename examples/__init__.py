# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Examples: configs, a pipeline of one's own, and what `make demo` trains."""

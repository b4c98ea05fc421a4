# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""How this package is connected with MaxText: what is replaced where, when, and in which of its versions."""

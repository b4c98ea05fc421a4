# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The only code that knows MaxText's insides: seams, version guard, activation. Imports nothing (see `startup`)."""

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""MaxText's trainers run in processes of their own, for the demo, the tests of reliability, and the documentation."""

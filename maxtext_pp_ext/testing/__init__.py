# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Help for tests: `plugin` runs MaxText's own tests with one of our pipelines. Importing this package imports nothing."""

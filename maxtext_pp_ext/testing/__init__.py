# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Help for tests, importing this package imports nothing.

`plugin` runs MaxText's own tests with one of our pipelines; `parity` compares a pipeline with a loop over its layers;
`trainer`, `train_runs`, `weights` and `records` run MaxText's trainers with the same data and weights in any layout.
"""

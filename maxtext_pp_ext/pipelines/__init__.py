# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The values of `pipeline_impl`: NNX modules that fulfil the host's contract, and name a gather policy each."""

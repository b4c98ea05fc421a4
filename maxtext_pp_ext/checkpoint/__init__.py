# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Moves a model's layers from their places in one checkpoint to those that another layout has.

`host.models.layouts` knows MaxText's names of layers.
"""

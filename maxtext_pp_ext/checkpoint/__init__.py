# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Moves a model's layers from their places in one checkpoint to those that another layout has.

`layout` and `moves` are arithmetic on paths and shapes. `guess` infers from them how a checkpoint's model was pipelined.
`files` reads and writes with Orbax, and `convert` combines these. `host.models.layouts` knows MaxText's names of layers.
"""

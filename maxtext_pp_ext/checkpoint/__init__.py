# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Where a model's layers are in a checkpoint, and how they get from there to where another model has them.

`layout` and `moves` are arithmetic on paths and shapes, `guess` tells from them how a checkpoint's model was pipelined,
`files` reads and writes with Orbax, `convert` puts these together. What MaxText calls its layers is known in
`host.models.layouts`.
"""

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""How weights and gradients travel between the devices of a stage: in which chunks, steps and orders in memory."""

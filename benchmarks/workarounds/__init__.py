# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Programs that show what the TPU compiler does left to itself, where the engine works around it."""

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""What TPUs are: rates, tori, tiles and kernels, as plain data with sources. Nothing of ours is imported here."""

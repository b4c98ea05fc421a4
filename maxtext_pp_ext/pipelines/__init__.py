# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""One small file per `pipeline_impl`: an NNX module with the host's contract that names a schedule and a residency."""

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""One small file per `pipeline_impl`: an NNX module that fulfils the host's contract and names a gather policy."""

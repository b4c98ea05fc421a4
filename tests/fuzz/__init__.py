# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Bad input of every kind: the command gives one error and an exit code, writes nothing and ends."""

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Errors that are no mistake in this package and none in a config. Standard library only."""


class SetupError(RuntimeError):
  """What is installed beside this package keeps it from working; the message says what it is, and what to do."""

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Exit codes, and errors that end a command with one message instead of a traceback."""

FAILED, UNUSABLE = 1, 2
# Errors about a user's input, with a message for people.
REFUSALS = (ValueError, NotImplementedError, OSError)


class CommandError(Exception):
  """Ends a command. `code` is the exit code: UNUSABLE if nothing was done, FAILED if it was tried."""

  def __init__(self, message: str, code: int = UNUSABLE):
    super().__init__(message)
    self.code = code

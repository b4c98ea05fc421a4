# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Exit codes, and errors that end a command with one message instead of a traceback."""

from collections.abc import Iterator
import contextlib

FAILED, UNUSABLE = 1, 2
# Errors about a user's input, with a message for people.
REFUSALS = (ValueError, NotImplementedError, OSError)


class CommandError(Exception):
  """Ends a command. `code` is the exit code: UNUSABLE if nothing was done, FAILED if it was tried."""

  def __init__(self, message: str, code: int = UNUSABLE):
    super().__init__(message)
    self.code = code


@contextlib.contextmanager
def refusing(before: str = "", code: int = UNUSABLE) -> Iterator[None]:
  """Turns an error about a user's input into a CommandError whose message begins with `before`."""
  try:
    yield
  except REFUSALS as error:
    raise CommandError(f"{before}{error}", code) from error

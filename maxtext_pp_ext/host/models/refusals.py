# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Turns MaxText's various errors about a config into one kind. Imports only the standard library."""

from collections.abc import Iterator, Mapping
import contextlib
from typing import Any

from maxtext_pp_ext.errors import SetupError

MOST_DEVICES = 1 << 20  # a mesh of more is a mistake


@contextlib.contextmanager
def as_value_errors(what: str) -> Iterator[None]:
  """Turns the errors that MaxText and its dependencies raise about a config into "MaxText cannot {what}: …".

  MaxText validates only some of its keys. Other bad values fail somewhere in its code: with AssertionError,
  ZeroDivisionError, AttributeError, RecursionError and more (0.2.5). Errors whose message is for people pass unchanged.
  """
  try:
    yield
  except (ValueError, NotImplementedError, OSError, ImportError, SetupError):
    raise
  except Exception as error:
    text = str(error).strip()
    raise ValueError(f"MaxText cannot {what}: {type(error).__name__}{': ' if text else ''}{text}") from error


def integer(given: Mapping[str, Any], key: str, default: int = 1) -> int:
  """The whole number that arguments give for a key, not yet validated by MaxText. Raises ValueError if it is none."""
  value = given.get(key, default)
  try:
    return int(value)
  except (TypeError, ValueError, OverflowError):
    raise ValueError(f"{key}={value!r} must be a whole number.") from None

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""What MaxText raises about what it cannot do, as one kind of error. Standard library only."""

from collections.abc import Iterator, Mapping
import contextlib
from typing import Any

from maxtext_pp_ext.errors import SetupError

MOST_DEVICES = 1 << 20  # a mesh of more is a mistake


@contextlib.contextmanager
def as_value_errors(what: str) -> Iterator[None]:
  """Turns what MaxText, and what it is made of, raise about a config into ValueErrors with the config to blame.

  MaxText validates a part of its keys. With other values it ends in whatever its code comes to: AssertionError,
  ZeroDivisionError, AttributeError, RecursionError and more (0.2.5).

  Args:
    what: what MaxText cannot do if anything else than an error with a message for people is raised.
  """
  try:
    yield
  except (ValueError, NotImplementedError, OSError, ImportError, SetupError):
    raise
  except Exception as error:
    text = str(error).strip()
    raise ValueError(f"MaxText cannot {what}: {type(error).__name__}{': ' if text else ''}{text}") from error


def integer(given: Mapping[str, Any], key: str, default: int = 1) -> int:
  """The whole number that arguments give for a key, before MaxText has looked at them.

  Raises:
    ValueError: it is none.
  """
  value = given.get(key, default)
  try:
    return int(value)
  except (TypeError, ValueError, OverflowError):
    raise ValueError(f"{key}={value!r} has to be a whole number.") from None

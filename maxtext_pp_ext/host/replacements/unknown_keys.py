# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""An error about mistyped keys that names them and what they are like. MaxText 0.2.5 lists all of its keys instead."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from maxtext_pp_ext.errors import Refusal
from maxtext_pp_ext.nearest import did_you_mean


class UnknownKeyError(Refusal, ValueError):
  """A config has keys that MaxText does not know; the message has a sentence for each."""


def told(prepare: Callable[[], Any], given: Mapping[str, Any], known: Iterable[str]) -> Any:
  """Calls MaxText's check of a config's keys. Raises UnknownKeyError for keys that it does not know.

  Args:
    prepare: MaxText's check.
    given: the keys of the run.
    known: MaxText's keys.
  """
  try:
    return prepare()
  except ValueError as error:
    known = list(known)
    unknown = [key for key in given if key not in known]
    if not any(str(error).startswith(f"{key!r} not in ") for key in unknown):
      raise
    raise UnknownKeyError("\n".join(sentence(key, known) for key in unknown)) from None


def sentence(key: str, known: Iterable[str]) -> str:
  """What is wrong with a key that is not among the known ones, and which of them it is like."""
  if any(character.isspace() for character in key):
    return f"{key!r} is no key of MaxText's config. A yml file of a run has lines of the form key: value."
  return f"{key!r} is no key of MaxText's config{did_you_mean(key, known)}"

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""An error about mistyped keys that names them and what they are like. MaxText 0.2.5 lists all of its keys instead."""

from collections.abc import Callable, Iterable
import inspect
from typing import Any

from maxtext_pp_ext.errors import Refusal
from maxtext_pp_ext.nearest import did_you_mean


class UnknownKeyError(Refusal, ValueError):
  """A config has keys that MaxText does not know; the message has a sentence for each."""


def prepare(own: Callable, *args: Any, **kwargs: Any) -> Any:
  """MaxText's `_prepare_for_pydantic`. Raises UnknownKeyError for keys that MaxText does not know."""
  try:
    return own(*args, **kwargs)
  except ValueError as error:
    bound = inspect.signature(own).bind(*args, **kwargs)
    bound.apply_defaults()
    known = list(bound.arguments["config_class"].model_fields)
    unknown = [key for key in bound.arguments["raw_keys"] if key not in known]
    if not any(str(error).startswith(f"{key!r} not in ") for key in unknown):
      raise
    raise UnknownKeyError("\n".join(sentence(key, known) for key in unknown)) from None


def sentence(key: str, known: Iterable[str]) -> str:
  """Says that a key is unknown, and which known key is like it."""
  if any(character.isspace() for character in key):
    return f"{key!r} is no key of MaxText's config. A yml file of a run has lines of the form key: value."
  return f"{key!r} is no key of MaxText's config{did_you_mean(key, known)}"

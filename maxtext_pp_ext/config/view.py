# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads a config: values of keys as plain Python, and views of a config with a few other values."""

from collections.abc import Mapping
import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class ConfigView:
  """Reads like `config`, except for the (key, value) pairs in `replaced`. Views of one config with equal pairs are equal.

  MaxText's own configs are read-only, and expensive to derive again.
  """

  config: Any
  replaced: tuple[tuple[str, Any], ...]

  def __getattr__(self, key: str) -> Any:
    if key.startswith("__"):
      raise AttributeError(key)  # copying and pickling ask before the fields exist
    for name, value in self.replaced:
      if name == key:
        return value
    return getattr(self.config, key)


def with_values[C](config: C, values: Mapping[str, Any]) -> C:
  """A `ConfigView` of a config with other values for these keys."""
  return ConfigView(config, tuple(values.items()))  # type: ignore[return-value]  # has all that C has, by __getattr__


class _Remembering:
  """Reads like a config, each key once."""

  def __init__(self, config: Any):
    self._config = config

  def __getattr__(self, key: str) -> Any:
    if key.startswith("_"):
      raise AttributeError(key)
    value = self.__dict__[key] = getattr(self._config, key)
    return value


def remembering[C](config: C) -> C:
  """A config that reads like this one, only faster if keys are read again and again. No key may change meanwhile."""
  return _Remembering(config)  # type: ignore[return-value]  # has all that C has, by __getattr__


def plain(value: Any) -> Any:
  """A key's value as in a yml file. MaxText holds some as enums, and as text before validation."""
  return getattr(value, "value", value)

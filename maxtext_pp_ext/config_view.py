# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""A config with other values for a few keys. MaxText's own configs are read-only and expensive to derive again."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class ConfigView:
  """Reads like `config`, but for the (key, value) pairs in `replaced`. Views of one config with equal pairs are equal."""

  config: Any
  replaced: tuple[tuple[str, Any], ...]

  def __getattr__(self, key: str) -> Any:
    if key.startswith("__"):
      raise AttributeError(key)  # copying and pickling ask before there are fields
    for name, value in self.replaced:
      if name == key:
        return value
    return getattr(self.config, key)

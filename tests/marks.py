# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Marks all values of a parameter as slow except a few: `make test` runs those, `make test-all` all of them."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import Any

import pytest


def slow_but(quick: Container[Any], values: Iterable[Any] | Mapping[str, Any], spread: bool = False) -> list[Any]:
  """`values` as parameters, of which only those in `quick` are not slow.

  Args:
    quick: keys if `values` is a mapping, else values.
    values: parameters, or a mapping from their ids.
    spread: whether each value is a tuple with one value for each of several parameters.
  """
  pairs = values.items() if isinstance(values, Mapping) else ((None, value) for value in values)
  marks = lambda name, value: () if (value if name is None else name) in quick else pytest.mark.slow
  given = lambda value: value if spread else (value,)
  return [pytest.param(*given(value), id=name, marks=marks(name, value)) for name, value in pairs]

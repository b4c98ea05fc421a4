# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tools for tests. Importing this package imports neither JAX nor MaxText.

`assert_pipeline_parity` compares pipelines with their layers, which may be yours or MaxText's (docs/parity.md). `plugin`
runs MaxText's own tests with one of our pipelines. `launch` runs a module in several joined processes.
"""

from typing import Any

__all__ = ["assert_pipeline_parity", "tolerance"]


def __getattr__(name: str) -> Any:
  if name not in __all__:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  from maxtext_pp_ext.testing import parity  # pylint: disable=import-outside-toplevel

  return getattr(parity, name)

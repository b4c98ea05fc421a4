# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The order of an array's dimensions in memory, where the TPU compiler's own choice costs copies."""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax.experimental.layout import Layout, with_layout_constraint


def in_memory(x: jax.Array, order: Sequence[int]) -> jax.Array:
  """The same array, with its dimensions in this order in memory, from major to minor."""
  return with_layout_constraint(x, Layout(major_to_minor=tuple(order)))

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The order of an array's dimensions in memory, where the TPU compiler's own choice costs copies."""

from __future__ import annotations

from collections.abc import Sequence
import itertools

import jax
from jax.experimental.layout import Layout, with_layout_constraint


def in_memory(x: jax.Array, order: Sequence[int]) -> jax.Array:
  """The same array, with its dimensions in this order in memory, from major to minor."""
  return with_layout_constraint(x, Layout(major_to_minor=tuple(order)))


_ROWS, _COLUMNS = 8, 128  # of a tile of memory


def as_stored(shape: Sequence[int]) -> tuple[int, ...]:
  """The order in which the TPU compiler (libtpu 0.0.48.1) keeps a parameter: the one with least padding to whole tiles.

  Args:
    shape: of a device's shard; 448 columns are padded to 512, and 2048 rows in their place are not.
  """
  own = tuple(range(len(shape)))
  if len(shape) < 2:
    return own

  def cost(order: tuple[int, ...]) -> tuple:
    rows, columns = (shape[dim] for dim in order[-2:])
    padded = -(-rows // _ROWS) * _ROWS * -(-columns // _COLUMNS) * _COLUMNS
    return padded / (rows * columns), order != own, -rows

  orders = [(*(dim for dim in own if dim not in last), *last) for last in itertools.permutations(own, 2)]
  return min(orders, key=cost)

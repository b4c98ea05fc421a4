# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The order of an array's dimensions in memory, where the TPU compiler's own choice costs copies."""

from collections.abc import Sequence
import itertools
import math

import jax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import AbstractMesh, Mesh

from maxtext_pp_ext.engine.transfers.torus import chip_of
from maxtext_pp_ext.hardware import tiles


def in_memory(x: jax.Array, order: Sequence[int]) -> jax.Array:
  """The same array, with its dimensions in this order in memory, from major to minor."""
  return with_layout_constraint(x, Layout(major_to_minor=tuple(order)))


def of_one_stage(order: Sequence[int]) -> list[int]:
  """An order of the dimensions [S, …] without that of the stages: the others are counted from 0 then."""
  return [dim - 1 for dim in order if dim]


def matrix_unit(mesh: Mesh | AbstractMesh) -> int | None:
  """The number of columns of a matrix unit of these devices; None if it is not known."""
  chip = chip_of(mesh)
  return None if chip is None else chip.matrix_unit


def as_stored(shape: Sequence[int]) -> tuple[int, ...]:
  """The order in which the TPU compiler keeps a parameter: the one with least padding to whole tiles.

  Of [2048, 448] the columns would be padded to 512. With the 2048 as columns nothing is padded (libtpu 0.0.48.1;
  benchmarks.workarounds order_of_parameter).

  Args:
    shape: of a device's shard of one repeat. The repeats, along which parameters are stacked, come before its dimensions.
  """
  own = tuple(range(len(shape)))
  if len(shape) < 2:
    return own

  def padded(order: tuple[int, ...]) -> int:
    rows, columns = (shape[dim] for dim in order[-2:])
    of_rows, of_columns = tiles.OF_32_BITS
    whole = rows if rows in (1, 2, 4) else -(-rows // of_rows) * of_rows
    return math.prod(shape) // (rows * columns) * whole * -(-columns // of_columns) * of_columns

  orders = [(*(dim for dim in own if dim not in last), *last) for last in itertools.permutations(own, 2)]
  return min(orders, key=lambda order: (padded(order), order))

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Draws, as text, which device holds which part of an array. The mesh may be abstract."""

from __future__ import annotations

from collections.abc import Sequence
import math

from jax.sharding import NamedSharding
import numpy as np

from maxtext_pp_ext.sharding.resolve import mesh_axes

_MOST = 8  # parts along an edge that are drawn


def parts(sharding: NamedSharding, rank: int) -> np.ndarray:
  """int [devices, rank]: for each device, the index of its part of the array along each dimension.

  Devices are numbered along the mesh's axes in their order.
  """
  sizes = dict(sharding.mesh.shape)
  coordinates = dict(zip(sizes, np.indices(tuple(sizes.values())), strict=True))
  found = np.zeros((math.prod(sizes.values()), rank), int)
  for dimension, entry in enumerate(sharding.spec):
    for axis in mesh_axes(entry):  # the first is the slowest
      found[:, dimension] = found[:, dimension] * sizes[axis] + coordinates[axis].reshape(-1)
  return found


def picture(shape: Sequence[int], sharding: NamedSharding) -> str:
  """A table with a cell for each part of the array and the devices that hold it.

  Rows are the parts along the first sharded dimension and columns those along the second. Along further sharded
  dimensions, only the first part is drawn.
  """
  where = parts(sharding, len(shape))
  counts = where.max(axis=0, initial=0) + 1
  drawn = [dimension for dimension, count in enumerate(counts) if count > 1]
  rows, columns = (*drawn, None, None)[:2]
  shown = (where[:, drawn[2:]] == 0).all(axis=1)
  above = _headings(shape, counts, columns)
  table = [["", *above]]
  for row, heading in enumerate(_headings(shape, counts, rows)):
    cells = []
    for column, other in enumerate(above):
      if "…" in (heading, other):  # stands for all parts that are left out
        cells.append("…")
        continue
      holds = shown
      for dimension, part in ((rows, row), (columns, column)):
        if dimension is not None:
          holds = holds & (where[:, dimension] == part)
      cells.append(_numbers(np.flatnonzero(holds)))
    table.append([heading, *cells])
  return "\n".join([_caption(shape, rows, columns, drawn[2:]), *_boxes(table)])


def _caption(shape: Sequence[int], rows: int | None, columns: int | None, others: list[int]) -> str:
  axes = [f"{what} along dimension {d}" for what, d in (("rows", rows), ("columns", columns)) if d is not None]
  text = f"[{', '.join(map(str, shape))}]: " + ("; ".join(axes) if axes else "replicated")
  if others:
    text += f"; the first part along dimension {' and '.join(map(str, others))}"
  return f"{text}; cells: devices"


def _headings(shape: Sequence[int], counts: np.ndarray, dimension: int | None) -> list[str]:
  if dimension is None:
    return ["all"]
  count, size = counts[dimension], shape[dimension] // counts[dimension]
  found = [f"{i * size}:{(i + 1) * size}" for i in range(min(count, _MOST))]
  return found + (["…"] if count > _MOST else [])


def _numbers(devices: np.ndarray) -> str:
  """0-3 8-11 for 0 1 2 3 8 9 10 11; at most four ranges."""
  runs = np.split(devices, np.flatnonzero(np.diff(devices) > 1) + 1)
  texts = [f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs if len(run)]
  return " ".join(texts if len(texts) <= 4 else [*texts[:3], "…"])


def _boxes(table: list[list[str]]) -> list[str]:
  widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
  line = "+".join(["", *("-" * (width + 2) for width in widths), ""])
  texts = ["|".join(["", *(f" {cell:^{width}} " for cell, width in zip(row, widths, strict=True)), ""]) for row in table]
  return [line, *(part for text in texts for part in (text, line))]

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Shows how a model is sharded, by which rules, what replication costs, and which device holds which part of an array."""

from collections.abc import Iterable, Iterator, Sequence
import dataclasses
import functools
import math
from typing import Any

from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np

from maxtext_pp_ext.sharding.conflicts import Conflict
from maxtext_pp_ext.sharding.resolve import Dimension, mesh_axes
from maxtext_pp_ext.sharding.variables import Layout, layouts, PyTree
from maxtext_pp_ext.units import bytes_text, counted

_MOST = 8  # parts along an edge that are drawn


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
  """One array of the model."""

  layout: Layout
  devices: int  #: number of devices of the mesh

  @functools.cached_property
  def shards(self) -> int:
    """Number of different parts of the array."""
    sharding = self.layout.sharding
    return math.prod(dict(sharding.mesh.shape)[axis] for entry in sharding.spec for axis in mesh_axes(entry))

  @property
  def replication(self) -> int:
    """Number of devices that hold the same part."""
    return self.devices // self.shards

  @property
  def bytes(self) -> int:
    """Bytes of the whole array."""
    return math.prod(self.layout.shape) * self.layout.dtype.itemsize

  @property
  def bytes_per_device(self) -> int:
    return -(-self.bytes // self.shards)

  @property
  def bytes_of_replication(self) -> int:
    """Bytes that each device would save if the array were sharded over all devices."""
    return self.bytes_per_device - -(-self.bytes // self.devices)

  @property
  def lines(self) -> Iterator[str]:
    """The array in words; a line per annotated dimension and per conflict."""
    layout = self.layout
    yield (
        f"{layout.path} {layout.dtype}{list(layout.shape)} P({', '.join(map(repr, layout.sharding.spec))}):"
        f" {bytes_text(self.bytes_per_device)} per device, {self.replication}x"
    )
    dimensions = map(_dimension_text, layout.resolution.dimensions) if layout.resolution else ["no annotation"]
    yield from (f"  {line}" for line in dimensions)
    yield from (f"  ! {conflict.kind.value}" for conflict in layout.conflicts)

  def to_dict(self) -> dict[str, Any]:
    layout = self.layout
    resolution = layout.resolution
    return {
        "path": layout.path,
        "shape": list(layout.shape),
        "dtype": str(layout.dtype),
        "logical_axes": None if resolution is None else [_name(name) for name in resolution.names],
        "spec": [_name(entry) for entry in layout.sharding.spec],
        "bytes": self.bytes,
        "bytes_per_device": self.bytes_per_device,
        "replication": self.replication,
        "dimensions": [
            {
                "name": _name(d.name),
                "size": d.size,
                "mesh_axes": list(mesh_axes(d.entry)),
                "rule": None if d.rule is None else str(d.rule),
                "dropped": {axis: why.value for axis, why in d.dropped.items()},
                "passed_over": [{"rule": str(passed.rule), "why": passed.why} for passed in d.passed],
            }
            for d in (resolution.dimensions if resolution else ())
        ],
        "conflicts": [{"kind": c.kind.value, "problem": c.problem, "remedy": c.remedy} for c in layout.conflicts],
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Explanation:
  """How a model is sharded."""

  mesh_shape: dict[str, int]  #: the size of each mesh axis
  rows: tuple[Row, ...]  #: its arrays, sorted by the bytes that replication costs each device, the most first

  @property
  def devices(self) -> int:
    return math.prod(self.mesh_shape.values())

  @property
  def conflicts(self) -> list[Conflict]:
    return [conflict for row in self.rows for conflict in row.layout.conflicts]

  @functools.cached_property
  def totals(self) -> dict[str, int]:
    """Sums over all arrays: count, elements, bytes, bytes per device, and the part of the latter due to replication."""
    return {
        "arrays": len(self.rows),
        "elements": sum(math.prod(row.layout.shape) for row in self.rows),
        "bytes": sum(row.bytes for row in self.rows),
        "bytes_per_device": sum(row.bytes_per_device for row in self.rows),
        "bytes_of_replication": sum(row.bytes_of_replication for row in self.rows),
    }

  def to_dict(self) -> dict[str, Any]:
    """The whole explanation as strings, numbers, lists and dicts."""
    return {
        "mesh": {axis: size for axis, size in self.mesh_shape.items() if size > 1},
        "devices": self.devices,
        "totals": self.totals,
        "parameters": [row.to_dict() for row in self.rows],
    }

  def __getitem__(self, path: str) -> Row:
    return {row.layout.path: row for row in self.rows}[path]

  def __str__(self) -> str:
    lines = (line for row in self.rows for line in row.lines)
    return "\n".join([mesh_text(self.mesh_shape), *lines, totals_text(self.totals)])


def explain(tree: PyTree, mesh: Mesh | AbstractMesh, rules: Iterable | None = None) -> Explanation:
  """Explains how a tree of NNX variables is sharded. Arguments as for `named_shardings`; values are not read."""
  rows = [Row(layout=layout, devices=mesh.size) for layout in layouts(tree, mesh, rules)]
  rows.sort(key=lambda row: (-row.bytes_of_replication, -row.bytes, row.layout.path))
  return Explanation(mesh_shape=dict(mesh.shape), rows=tuple(rows))


def _dimension_text(d: Dimension) -> str:
  """A dimension's mesh axes, the rule that bound it, and the rules passed over and why."""
  parts = [f"{d.index} {_name(d.name)}: {_bound_text(d)}"]
  for why in dict.fromkeys(d.dropped.values()):
    parts.append(f"{', '.join(axis for axis, reason in d.dropped.items() if reason is why)}: {why.value}")
  return "; ".join([*parts, *(f"passed over {passed.rule}: {passed.why}" for passed in d.passed)])


def axes_text(layout: Layout) -> str:
  """The mesh axes of each dimension in turn, - for none: `fsdp - tensor+expert`; or `replicated`."""
  sizes = dict(layout.sharding.mesh.shape)
  found = [
      "compiler" if entry is P.UNCONSTRAINED else "+".join(axis for axis in mesh_axes(entry) if sizes.get(axis, 1) > 1)
      for entry in (*layout.sharding.spec, *[None] * (len(layout.shape) - len(layout.sharding.spec)))
  ]
  return " ".join(axes or "-" for axes in found) if any(found) else "replicated"


def mesh_text(mesh_shape: dict[str, int]) -> str:
  sizes = ", ".join(f"{axis}={size}" for axis, size in mesh_shape.items() if size > 1)
  return f"mesh of {counted(math.prod(mesh_shape.values()), 'device')}: {sizes or 'one device'}"


def totals_text(totals: dict[str, int]) -> str:
  return (
      f"{totals['arrays']} arrays, {totals['elements']:,} elements, {bytes_text(totals['bytes'])};"
      f" {bytes_text(totals['bytes_per_device'])} per device; sharding all arrays over all devices would save"
      f" {bytes_text(totals['bytes_of_replication'])} of these"
  )


def _bound_text(d: Dimension) -> str:
  if d.entry is P.UNCONSTRAINED:
    return "left to the compiler" + (f" by {d.rule}" if d.rule else "")
  to = " and ".join(mesh_axes(d.entry)) or "replicated"
  if d.rule:
    return f"{to} by {d.rule}"
  return f"{to}, no rule" if isinstance(d.name, str) and not d.passed else to


def _name(name: Any) -> Any:
  return str(name) if name is P.UNCONSTRAINED else name if name is None or isinstance(name, str) else list(name)


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
  """A table with a cell for each part of the array and the devices that hold it. The mesh may be abstract.

  Rows are the parts along the first sharded dimension and columns those along the second. Along further sharded
  dimensions, only the first part is drawn.
  """
  where = parts(sharding, len(shape))
  counts = where.max(axis=0, initial=0) + 1
  drawn = [dimension for dimension, count in enumerate(counts) if count > 1]
  rows, columns = (*drawn, None, None)[:2]
  shown = (where[:, drawn[2:]] == 0).all(axis=1)
  in_column = where[:, columns] if columns is not None else np.zeros(len(where), int)
  in_row = where[:, rows] if rows is not None else in_column
  above = _headings(shape, counts, columns)
  table = [["", *above]]
  for row, heading in enumerate(_headings(shape, counts, rows)):
    holds = [np.flatnonzero(shown & (in_row == row) & (in_column == column)) for column in range(len(above))]
    # … stands for all parts that are left out.
    cells = ("…" if "…" in (heading, other) else _numbers(held) for other, held in zip(above, holds, strict=True))
    table.append([heading, *cells])
  axes = [f"{what} along dimension {d}" for what, d in (("rows", rows), ("columns", columns)) if d is not None]
  caption = f"[{', '.join(map(str, shape))}]: " + ("; ".join(axes) if axes else "replicated")
  if others := drawn[2:]:
    caption += f"; the first part along dimension {' and '.join(map(str, others))}"
  return "\n".join([f"{caption}; cells: devices", *_boxes(table)])


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

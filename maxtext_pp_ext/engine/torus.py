# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The steps in which weights are gathered: one for each axis of the torus of chips.

The TPU compiler (libtpu 0.0.48.1) can run a gather on the SparseCores, beside compute, if its devices lie along one
axis of the torus. On v5p a gather over two or three axes stands in line, whatever the flags. Step by step it sends the
same bytes over fewer links at a time, so it takes longer; beside compute that costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
import math

from jax.sharding import Mesh
import numpy as np

# An axis of the mesh -> the sizes of its steps, from major to minor; their product is its size.
Steps = tuple[tuple[str, tuple[int, ...]], ...]


def steps_of(mesh: Mesh) -> Steps:
  """Returns the steps of each axis of the mesh whose devices lie along several axes of the torus."""
  if not isinstance(mesh, Mesh):  # an abstract mesh has no devices
    return ()
  found = ((axis, sizes_along(_line(mesh, axis))) for axis in mesh.axis_names)
  return tuple((axis, sizes) for axis, sizes in found if len(sizes) > 1)


def groups(sizes: Sequence[int]) -> list[list[list[int]]]:
  """For each step, from major to minor, the groups of an axis' devices that gather from each other."""
  numbers = np.arange(math.prod(sizes)).reshape(sizes)
  return [np.moveaxis(numbers, step, -1).reshape(-1, size).tolist() for step, size in enumerate(sizes)]


def _line(mesh: Mesh, axis: str) -> list[tuple[int, ...]]:
  """The coordinates in the torus of the devices along one axis of the mesh, at the first position of all others."""
  devices = np.moveaxis(mesh.devices, mesh.axis_names.index(axis), 0)
  return [tuple(getattr(each, "coords", ())) for each in devices.reshape(len(devices), -1)[:, 0]]


def sizes_along(line: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
  """The numbers of devices from one turn to the next; one number if the line is not such a box, or has no coordinates."""
  whole = (len(line),)
  sizes: list[int] = []
  while len(line) > 1:
    straight = 2
    while straight < len(line) and _turns(line[: straight + 1]) == 1:
      straight += 1
    if _turns(line[:straight]) != 1 or len(line) % straight:
      return whole
    sizes.insert(0, straight)
    line = line[::straight]
  return tuple(sizes) or whole


def _turns(line: Sequence[tuple[int, ...]]) -> int:
  """The number of coordinates that are not the same for all."""
  return sum(len(set(values)) > 1 for values in zip(*line, strict=True))

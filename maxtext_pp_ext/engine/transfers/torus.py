# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The steps in which weights are gathered: one for each axis of the torus of chips.

The TPU compiler (libtpu 0.0.48.1; benchmarks.workarounds gather_over_several_axes) can run a gather on the SparseCores,
overlapped with compute, if its devices lie along one axis of the torus. On v5p a gather over two or three axes stands in
line, whatever the flags. Step by step it sends the same bytes over fewer links at a time, so it takes longer; overlapped
with compute that costs nothing. Where one ring goes through all chips of a slice, large weights are gathered in one step
(`Transfer.along_ring`): there it runs on the SparseCores, too, and takes half the time.

The last step of a gather brings nearly all bytes. Of 8 × 16 chips only the axis of 16 is closed to a ring, over which a
device receives from both sides (`rings`). Along a weight's first dimension it comes last, though it is the minor one.
"""

from collections.abc import Sequence
import math
from typing import Any

from jax.sharding import AbstractMesh, Mesh
import numpy as np

from maxtext_pp_ext.hardware import chips
from maxtext_pp_ext.hardware.torus import closed

# An axis of the mesh -> the sizes of its steps, from major to minor; their product is its size.
Steps = tuple[tuple[str, tuple[int, ...]], ...]


def steps_of(mesh: Mesh) -> Steps:
  """Returns the steps of each axis of the mesh whose devices are in one torus.

  An axis over several slices has none: what is gathered between slices must come first, when it is smallest.
  """
  if not isinstance(mesh, Mesh):  # an abstract mesh has no devices
    return ()
  lines = ((axis, _line(mesh, axis)) for axis in mesh.axis_names)
  return tuple((axis, sizes_along(line)) for axis, line in lines if line)


def rings(mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
  """Returns the mesh axes that go over both axes of a torus of two, of which only that of the minor step is a ring."""
  if not isinstance(mesh, Mesh):  # an abstract mesh has no devices
    return ()
  first = _slice_of(mesh.devices.flat[0])
  together = _lengths(_places(np.array([each for each in mesh.devices.flat if _slice_of(each) == first], object)))
  # Chips of such a torus have a third coordinate, 0.
  axes = [axis for axis, length in enumerate(together) if length > 1]
  if len(axes) != 2:
    return ()
  whole_rings = {axis for axis, is_ring in zip(axes, closed([together[axis] for axis in axes]), strict=True) if is_ring}

  def is_ring(line: list[tuple[int, ...]], step: int, size: int) -> bool:
    changing = _changing([line[0], line[step]])  # nothing, between the two devices of a chip of TPU7x
    return whole_rings.issuperset(changing) and [together[axis] for axis in changing] == [size]

  found: list[str] = []
  for axis, sizes in steps_of(mesh):
    line = _line(mesh, axis)
    if len(sizes) == 2 and is_ring(line, 1, sizes[1]) and not is_ring(line, sizes[1], sizes[0]):
      found.append(axis)
  return tuple(found)


def sizes_along(line: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
  """Returns the number of devices along each axis of the torus, from major to minor; one number if they are no box.

  Args:
    line: the devices' coordinates, in the order of an axis of the mesh.
  """
  whole, corners = (len(line),), list(line)
  sizes: list[int] = []
  while len(corners) > 1:
    straight = 2
    while straight < len(corners) and len(_changing(corners[: straight + 1])) == 1:
      straight += 1
    if len(corners) % straight:
      return whole
    sizes.insert(0, straight)
    corners = corners[::straight]
  box = np.array(line).reshape(*sizes, -1)
  turns = [_changing((box - box.take([0], step)).reshape(-1, box.shape[-1])) for step in range(len(sizes))]
  return tuple(sizes) if sizes and all(len(each) == 1 for each in turns) else whole


def lengths(mesh: Mesh) -> list[int]:
  """Returns how many chips all devices of the mesh have along each axis of the torus; [] if they are not in one."""
  return _lengths(_places(mesh.devices.ravel())) if isinstance(mesh, Mesh) else []  # an abstract mesh has no devices


def chip_of(mesh: Mesh | AbstractMesh) -> chips.Chip | None:
  """Returns the chip of all devices of the mesh; None if it is not known."""
  return chips.of_device_kind(mesh.devices.flat[0].device_kind) if isinstance(mesh, Mesh) else None


def slices_along(mesh: Mesh | AbstractMesh, axis: str) -> int:
  """Returns over how many slices an axis of the mesh goes; 1 unless they follow one another and are of one size."""
  if not isinstance(mesh, Mesh):  # an abstract mesh has no devices
    return 1
  numbers = [_slice_of(each) for each in _along(mesh, axis)]
  slices = list(dict.fromkeys(numbers))
  return len(slices) if numbers == [each for each in slices for _ in range(len(numbers) // len(slices))] else 1


def groups(sizes: Sequence[int]) -> list[list[list[int]]]:
  """For each step, from major to minor, the groups of an axis' devices that gather from each other."""
  numbers = np.arange(math.prod(sizes)).reshape(sizes)
  return [np.moveaxis(numbers, step, -1).reshape(-1, size).tolist() for step, size in enumerate(sizes)]


def _line(mesh: Mesh, axis: str) -> list[tuple[int, ...]]:
  """The coordinates of the devices along an axis, at the first position of all others; [] if not in one torus."""
  return _places(_along(mesh, axis))


def _along(mesh: Mesh, axis: str) -> np.ndarray:
  """The devices along an axis, at the first position of all others."""
  devices = np.moveaxis(mesh.devices, mesh.axis_names.index(axis), 0)
  return devices.reshape(len(devices), -1)[:, 0]


def _slice_of(device: Any) -> int:
  """The number of a device's slice; devices that are in none have number 0."""
  return getattr(device, "slice_index", 0)


def _places(devices: np.ndarray) -> list[tuple[int, ...]]:
  """The coordinates of devices; [] if they are not in one torus."""
  in_torus = all(hasattr(each, "coords") for each in devices)
  slices = {_slice_of(each) for each in devices}
  return [tuple(each.coords) for each in devices] if in_torus and len(slices) == 1 else []


def _lengths(places: Sequence[tuple[int, ...]]) -> list[int]:
  """The number of chips along each coordinate."""
  return [len(set(along)) for along in zip(*places, strict=True)]


def _changing(points: Sequence[Sequence[int]] | np.ndarray) -> list[int]:
  """The coordinates that are not the same for all points."""
  return [number for number, values in enumerate(zip(*points, strict=True)) if len(set(values)) > 1]

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The chips of a `compile_topology`, and whether JAX can lay a mesh out on them.

JAX gives each mesh axis whole axes of the chips' torus, or with `allow_split_physical_axes` parts of them
(`jax.experimental.mesh_utils`). Without that key a mesh of 2 × 16 does not fit 2 × 4 × 4 chips in every order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import functools
import itertools
import math
from typing import Any

from maxtext_pp_ext.config.keys import DerivedKeys

# What JAX calls them (jax/_src/mesh_utils.py): some kinds have layouts of their own.
_KINDS = {"v4": "TPU v4", "v5e": "TPU v5 lite", "v5p": "TPU v5", "v6e": "TPU v6 lite", "tpu7x": "TPU7x"}


@dataclasses.dataclass(frozen=True)
class _Device:
  """What JAX reads of a device to place it in a mesh."""

  id: int
  device_kind: str
  coords: tuple[int, ...]
  core_on_chip: int
  platform: str = "tpu"
  process_index: int = 0


def topologies() -> Mapping[str, Any]:
  """The names that `compile_topology` may have, with their chips; {} if MaxText has them elsewhere."""
  from maxtext.utils import accelerator_to_spec_map  # pylint: disable=import-outside-toplevel

  return getattr(accelerator_to_spec_map, "UserFacingNameToSystemCharacteristics", {})


def can_lay_out(config: DerivedKeys, ici: Sequence[int], *, splits: bool) -> bool:
  """Returns whether JAX can lay a mesh out on a slice of a config's `compile_topology`; True where that is not known.

  Args:
    config: MaxText's config.
    ici: the number of devices of each mesh axis within a slice.
    splits: whether a mesh axis may have a part of a torus axis (`allow_split_physical_axes`).
  """
  topology = str(config.compile_topology or "")
  if topology.partition("-")[0] not in _KINDS or config.custom_mesh or topology not in topologies():
    return True
  return _can_lay_out(topology, tuple(ici), splits)


def lengths(topology: str) -> tuple[int, ...]:
  """Returns the chips along each axis of the torus."""
  return tuple(map(int, topologies()[topology].topology_name.partition(":")[2].split("x")))


@functools.lru_cache(maxsize=1 << 12)
def _can_lay_out(topology: str, ici: tuple[int, ...], splits: bool) -> bool:
  from jax.experimental import mesh_utils  # pylint: disable=import-outside-toplevel

  devices = _devices(topology)
  if math.prod(ici) != len(devices):
    return True  # MaxText has an error of its own
  try:
    mesh_utils.create_device_mesh(ici, devices, allow_split_physical_axes=splits)
  except NotImplementedError:
    return False
  return True


@functools.lru_cache(maxsize=8)
def _devices(topology: str) -> list[_Device]:
  """The devices of a slice in JAX's order: the cores of a chip, then the first coordinate."""
  sizes = (*lengths(topology), 1, 1)[:3]
  cores = topologies()[topology].devices_per_slice // math.prod(sizes)
  places = itertools.product(*map(range, reversed(sizes)), range(cores))
  kind = _KINDS[topology.partition("-")[0]]
  return [_Device(number, kind, tuple(reversed(place)), core) for number, (*place, core) in enumerate(places)]

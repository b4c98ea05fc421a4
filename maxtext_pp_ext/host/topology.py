# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The chips of a `compile_topology`, and whether a mesh divides the axes of their torus.

JAX gives each mesh axis whole axes of the torus, or with `allow_split_physical_axes` parts of them: without that key it
refuses a mesh of 2 × 8 × 2 on 2 × 4 × 4 chips (`jax.experimental.mesh_utils`).
"""

from collections.abc import Mapping, Sequence
import functools
import itertools
import math
from types import SimpleNamespace
from typing import Any

from maxtext_pp_ext.config.keys import DerivedKeys
from maxtext_pp_ext.hardware.chips import CHIPS
from maxtext_pp_ext.hardware.torus import Slice
from maxtext_pp_ext.nearest import beside


def topologies() -> Mapping[str, Any]:
  """The names that `compile_topology` may have, with their chips; {} if MaxText has them elsewhere."""
  from maxtext.utils import accelerator_to_spec_map  # pylint: disable=import-outside-toplevel

  return getattr(accelerator_to_spec_map, "UserFacingNameToSystemCharacteristics", {})


def divides_axes(config: DerivedKeys, ici: Sequence[int]) -> bool:
  """Whether a mesh, `ici` devices of each axis in a slice, divides axes of the torus; False where it is not known."""
  topology = str(config.compile_topology or "")
  known = topology.partition("-")[0] in CHIPS and topology in topologies()
  # MaxText reads custom_mesh, an order of its own, with several slices or divided axes only.
  is_custom = bool(config.custom_mesh) and (config.num_slices > 1 or config.allow_split_physical_axes)
  return known and not is_custom and _divides_axes(topology, tuple(ici))


def lengths(topology: str) -> tuple[int, ...]:
  """The chips along each axis of the torus."""
  return tuple(map(int, topologies()[topology].topology_name.partition(":")[2].split("x")))


def devices(topology: str) -> int:
  """The devices of JAX in a slice."""
  return topologies()[topology].devices_per_slice


def cores(topology: str) -> int:
  """The devices of JAX in a chip."""
  return devices(topology) // math.prod(lengths(topology))


def slice_of(kind: str, count: int) -> Slice | None:
  """The slice of a kind of chip, such as v5p, with so many devices of JAX; None if MaxText's table has none."""
  name = _by_devices(kind).get(count)
  return Slice(name=name, lengths=lengths(name), cores=cores(name)) if name else None


def nearest(kind: str, count: int) -> list[str]:
  """The topologies of a kind with the next fewer and the next more devices than a number, as far as there are."""
  found = _by_devices(kind)
  return [found[size] for size in sorted(beside(count, found))]


def _by_devices(kind: str) -> dict[int, str]:
  return {devices(name): name for name in topologies() if name.partition("-")[0] == kind}


def chips(topology: str) -> str:
  """The chips of a slice in words, such as "2 × 4 × 4 chips"."""
  found, per_chip = lengths(topology), cores(topology)
  return f"{' × '.join(map(str, found))} chips" + (f" of {per_chip} devices each" if per_chip > 1 else "")


@functools.lru_cache(maxsize=1 << 12)
def _divides_axes(topology: str, ici: tuple[int, ...]) -> bool:
  from jax.experimental import mesh_utils  # pylint: disable=import-outside-toplevel

  if math.prod(ici) != devices(topology):
    return False  # MaxText has an error of its own
  # In JAX's order: the cores of a chip, then the first coordinate.
  padded = (*lengths(topology), 1, 1)[:3]
  places = itertools.product(*map(range, reversed(padded)), range(cores(topology)))
  kind = CHIPS[topology.partition("-")[0]].device_kinds[0]  # some have layouts of their own
  # What JAX reads of a device to place it in a mesh.
  alike = {"device_kind": kind, "platform": "tpu", "process_index": 0}
  absent = [
      SimpleNamespace(**alike, id=number, coords=tuple(reversed(place)), core_on_chip=core)
      for number, (*place, core) in enumerate(places)
  ]
  try:
    mesh_utils.create_device_mesh(ici, absent)
  except NotImplementedError:
    return True
  return False

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The weights of a config's model, as one device has them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
import dataclasses
import math
import re
from typing import Any

import jax.numpy as jnp
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from maxtext_pp_ext import sharding
from maxtext_pp_ext.config.keys import DerivedKeys
from maxtext_pp_ext.config.view import plain
from maxtext_pp_ext.hardware import tiles
from maxtext_pp_ext.host.models.axes import ACTIVATION_AXES, data_mesh_axes
from maxtext_pp_ext.sharding.explain import Row
from maxtext_pp_ext.sharding.gathered import gathered_spec
from maxtext_pp_ext.sharding.resolve import mesh_axes, resolve

# The optimizers whose moments are known.
ADAMS = ("adamw", "adam_pax")


@dataclasses.dataclass(frozen=True)
class Weight:
  """One array of weights on a device.

  Attributes:
    count: elements of all layers stacked in it, sharded as a stage computes with them.
    dtype: the dtype in which it is stored.
    gathered_over: the mesh axes over which it is gathered.
    replicas_over: the mesh axes that shard the batch but not this array, so gradients are summed over them.
    of_experts: whether each expert has its own.
    in_lanes: whether a TPU stores the shards with the last axis in its lanes, as kernels read it once it is gathered.
    scatters: whether XLA reduces its gradient by a reduce-scatter, and not by an all-reduce, which sends it twice.
  """

  count: float
  dtype: Any
  gathered_over: frozenset[str]
  replicas_over: frozenset[str]
  of_experts: bool
  in_lanes: bool
  scatters: bool


class Weights:
  """The arrays of weights of a config's model, as they are on one device.

  Attributes:
    parameters: how they are sharded.
    mesh: their mesh.
    moments: bytes of the optimizer's moments.
  """

  def __init__(self, config: DerivedKeys, parameters: sharding.Explanation, mesh: AbstractMesh):
    self.parameters, self.mesh, self.moments = parameters, mesh, _moments(config, parameters)
    self._data_axes = data_mesh_axes(mesh, config.logical_axis_rules)
    self._of_batch = axes_of(resolve(ACTIVATION_AXES[:2], mesh, config.logical_axis_rules)) - {"stage"}
    self._parted: dict[re.Pattern, tuple[list[Weight], list[Weight]]] = {}

  def parted(self, inside: re.Pattern) -> tuple[list[Weight], list[Weight]]:
    """Returns (the weights whose paths match, the others). Those that are alike but for their counts are added up."""
    if inside not in self._parted:  # a plan asks for each number of microbatches
      counts: tuple[dict[Weight, float], dict[Weight, float]] = ({}, {})
      for row in self.parameters.rows:
        outside = not inside.match(row.layout.path)
        weight = self._weight(row, outside)
        alike = dataclasses.replace(weight, count=0.0)
        counts[outside][alike] = counts[outside].get(alike, 0.0) + weight.count
      within, beside = ([dataclasses.replace(each, count=count) for each, count in of.items()] for of in counts)
      self._parted[inside] = within, beside
    return self._parted[inside]

  def _weight(self, row: Row, outside: bool) -> Weight:
    layout, shape = row.layout, self.mesh.shape
    spec, names = layout.sharding.spec, layout.resolution.names if layout.resolution else None
    kept = gathered_spec(spec, names, self._data_axes) if names is not None and len(names) == len(spec) else spec
    all_axes, kept_axes = axes_of(spec), axes_of(kept)
    count = math.prod(layout.shape) / math.prod(shape[axis] for axis in kept_axes if axis != "stage")
    # The stages share what is outside the pipeline.
    batch = self._of_batch | ({"stage"} & set(shape)) if outside else self._of_batch
    return Weight(
        count,
        layout.dtype,
        frozenset(all_axes - kept_axes),
        frozenset(batch - all_axes),
        of_experts="exp" in (names or ()),
        in_lanes=in_lanes(layout.shape, spec, kept_axes, shape),
        scatters=scatters(layout.shape, spec, kept_axes, shape),
    )


def in_lanes(shape: Sequence[int], spec: P, kept: Collection[str], mesh: Mapping[str, int]) -> bool:
  """Returns whether a TPU stores an array's shards with the last axis in its lanes, or gathers nothing along that axis.

  It stores another axis there if shards of the last one are no multiple of its lanes, which would be padded.

  Args:
    shape: of the whole array.
    spec: how it is stored.
    kept: the mesh axes over which it is not gathered.
    mesh: sizes of the mesh axes.
  """
  return _divides(tiles.LANES, 1, shape, spec, kept, mesh)


def scatters(shape: Sequence[int], spec: P, kept: Collection[str], mesh: Mapping[str, int]) -> bool:
  """Returns whether XLA's partitioner reduces an array's gradient by a reduce-scatter. Arguments as of `in_lanes`.

  It does if all devices together do not shard the array (`Sizes.over_all_devices`), and shards of the last two axes are
  multiples of what `tiles.REDUCE_SCATTERED` has.
  """
  return all(_divides(size, axis, shape, spec, kept, mesh) for axis, size in tiles.REDUCE_SCATTERED.items())


def _divides(size: int, axis: int, shape: Sequence[int], spec: P, kept: Collection[str], mesh: Mapping[str, int]) -> bool:
  """Whether shards of an axis, counted from the last, are multiples of a size, or nothing is gathered along it."""
  over = mesh_axes(spec[-axis]) if len(shape) >= axis and len(spec) == len(shape) else ()
  return set(over) <= set(kept) or shape[-axis] // math.prod(mesh[name] for name in over) % size == 0


def axes_of(spec: P) -> set[str]:
  """Returns the mesh axes in a PartitionSpec."""
  return {axis for entry in spec for axis in mesh_axes(entry)}


def _moments(config: DerivedKeys, parameters: sharding.Explanation) -> int:
  if plain(config.opt_type) not in ADAMS:
    return 0
  first = jnp.dtype(config.mu_dtype).itemsize if config.mu_dtype else None
  return round(
      sum(row.bytes_per_device * (1 + (first / row.layout.dtype.itemsize if first else 1)) for row in parameters.rows)
  )

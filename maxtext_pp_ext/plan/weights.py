# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The weights of a config's model, as one device has them."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
import dataclasses
import functools
import math
import re
from typing import Any

import jax.numpy as jnp
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from maxtext_pp_ext import sharding
from maxtext_pp_ext.config.derived import collective_matmul_from, sums_logits_in_parts
from maxtext_pp_ext.config.keys import DerivedKeys
from maxtext_pp_ext.config.view import plain
from maxtext_pp_ext.hardware import tiles
from maxtext_pp_ext.hardware.collective_matmul import CollectiveMatmul, is_made
from maxtext_pp_ext.hardware.torus import is_one_ring, Slice
from maxtext_pp_ext.host.models import abstract_model
from maxtext_pp_ext.host.models.axes import ACTIVATION_AXES, data_mesh_axes
from maxtext_pp_ext.schedule import CircularSchedule
from maxtext_pp_ext.sharding.resolve import LogicalAxes, mesh_axes, read_rules, resolve, Rules

# The optimizers whose moments are known.
ADAMS = ("adamw", "adam_pax")


@dataclasses.dataclass(frozen=True)
class Weight:
  """One array of weights on a device."""

  count: float  # elements of all layers stacked in it, sharded as a stage computes with them
  dtype: Any  # the dtype in which it is stored
  gathered_over: frozenset[str]  # the mesh axes over which it is gathered
  # The mesh axes that shard the batch but not this array, so gradients are summed over them.
  replicas_over: frozenset[str]
  of_experts: bool  # whether each expert has its own
  # Whether a TPU stores the shards with the last axis in its lanes, as kernels read it once it is gathered.
  in_lanes: bool
  # Whether XLA's partitioner reduces its gradient by a reduce-scatter, and not by an all-reduce, which sends it twice. Of
  # an array that all devices together shard it never does, unless one ring goes through them (`Sizes.in_steps`).
  scatters: bool
  # The length of the dimension along which it is gathered, and the elements of one layer's other dimensions, as a stage
  # computes with them; 0 if it is gathered along none or several.
  along: float
  others: float


_STACK = re.compile("layers|scanned_blocks|circular_repeats")  # in the name of a dimension along which layers are stacked
_OTHERS_THAN_LOGITS = re.compile(r"(?!decoder/logits_dense/)")


class Weights:
  """The arrays of weights of a config's model on one device: how they are sharded, and bytes of their moments."""

  def __init__(self, config: DerivedKeys, parameters: sharding.Explanation, mesh: AbstractMesh):
    self.parameters, self.mesh, self.moments = parameters, mesh, _moments(config, parameters)
    self._data_axes = data_mesh_axes(mesh, config.logical_axis_rules)
    self._of_batch = axes_of(resolve(ACTIVATION_AXES[:2], mesh, config.logical_axis_rules)) - {"stage"}
    self._parted: dict[re.Pattern, tuple[list[Weight], list[Weight]]] = {}

  def parted(self, inside: re.Pattern) -> tuple[list[Weight], list[Weight]]:
    """Returns (the weights whose paths match, the others). Those that are alike but for their counts are added up."""
    if inside not in self._parted:  # a plan asks for each number of microbatches
      counts: tuple[dict[Weight, float], dict[Weight, float]] = ({}, {})
      for path, count, of_stage, shared in self._rows:
        outside = not inside.match(path)
        weight = shared if outside else of_stage
        counts[outside][weight] = counts[outside].get(weight, 0.0) + count
      within, beside = ([dataclasses.replace(each, count=count) for each, count in of.items()] for of in counts)
      self._parted[inside] = within, beside
    return self._parted[inside]

  def of_logits(self) -> list[Weight]:
    """The weight of the logits, if it is not the table of embeddings; as one outside of what is `parted`."""
    return self.parted(_OTHERS_THAN_LOGITS)[1]

  @functools.cached_property
  def _rows(self) -> list[tuple[str, float, Weight, Weight]]:
    """Of each array its path, its count, and its weight without a count, if it is inside of a pipeline and if not."""
    known: dict[tuple, tuple[float, Weight, Weight]] = {}  # those of a stage's layers are alike
    rows = []
    for layout in (row.layout for row in self.parameters.rows):
      names = layout.resolution.names if layout.resolution else None
      key = layout.shape, layout.dtype, layout.sharding.spec, names
      if key not in known:
        known[key] = self._weight(layout, names)
      rows.append((layout.path, *known[key]))
    return rows

  def _weight(self, layout: sharding.Layout, names: LogicalAxes | None) -> tuple[float, Weight, Weight]:
    shape, spec = self.mesh.shape, layout.sharding.spec
    kept = gathered(layout, self._data_axes)
    all_axes, kept_axes = axes_of(spec), axes_of(kept)
    count = math.prod(layout.shape) / math.prod(shape[axis] for axis in kept_axes if axis != "stage")
    along = [k for k, of in enumerate(spec) if not kept_axes.issuperset(mesh_axes(of))]
    parts = lambda k: math.prod(shape[axis] for axis in mesh_axes(spec[k]) if axis in kept_axes)
    length = layout.shape[along[0]] / parts(along[0]) if len(along) == 1 else 0.0
    layers = math.prod(size for size, name in zip(layout.shape, names or (), strict=False) if _STACK.search(str(name)))
    weight = Weight(
        0.0,
        layout.dtype,
        frozenset(all_axes - kept_axes),
        frozenset(self._of_batch - all_axes),
        of_experts="exp" in (names or ()),
        # Shards that are no multiple of the lanes would be padded there.
        in_lanes=fills({1: tiles.LANES}, layout.shape, spec, kept_axes, shape),
        scatters=fills(tiles.REDUCE_SCATTERED, layout.shape, spec, kept_axes, shape),
        along=length,
        others=count / layers / length if length else 0.0,
    )
    shared = weight.replicas_over | ({"stage"} & set(shape)) - all_axes  # the stages share what is outside the pipeline
    return count, weight, dataclasses.replace(weight, replicas_over=shared)


class Bytes:
  """Bytes of a weight on a device, of its gather and of its gradient's reduction. Those of transfers are what it sends.

  The schedule is None without a pipeline or window: then collective matmuls count. Of `circular` they do not. With one
  microbatch a gradient is no sum over microbatches. `its_slice` says whether one ring goes through all devices.
  """

  def __init__(self, config: DerivedKeys, mesh: AbstractMesh, schedule: CircularSchedule | None, its_slice: Slice | None):
    self._config, self._mesh, self._schedule, self._its_slice = config, mesh, schedule, its_slice
    self._along_ring = config.num_slices == 1 and its_slice is not None and is_one_ring(its_slice.lengths)
    self._collective_from = collective_matmul_from(config)
    self._slices = dict(zip(config.mesh_axes, abstract_model.parallelism(config, "dcn"), strict=True))

  def stored(self, w: Weight) -> float:
    return w.count * w.dtype.itemsize

  def narrow(self, w: Weight) -> float:
    """In the dtype of storage or compute, whichever is narrower."""
    return w.count * self._itemsize(w)

  def gathered(self, w: Weight) -> float:
    return self.stored(w) if self._config.pipeline_gather_dtype == "weight" else self.narrow(w)

  def summed(self, w: Weight) -> float:
    """Of the gradient, as it is summed over microbatches."""
    if self._config.pipeline_grad_accum_dtype != "auto":
      return w.count * jnp.dtype(self._config.pipeline_grad_accum_dtype).itemsize
    return self.gathered(w) if self._schedule and self._schedule.microbatches == 1 else self.stored(w)

  def shard(self, w: Weight, size: float) -> float:
    """Of so many bytes, those of a device before it gathers, or after it has reduced."""
    return size / self._over(w.gathered_over)

  def cast(self, w: Weight) -> float:
    """The values of a device's shard that are cast before it gathers."""
    return self.shard(w, w.count) if self.gathered(w) != self.stored(w) else 0.0

  def to_gather(self, w: Weight, *, narrow: bool = False) -> float:
    size = self.narrow(w) if narrow else self.gathered(w)
    return size - self.shard(w, size)

  def reduced(self, w: Weight) -> float:
    """A reduce-scatter over the axes that shard the weight, then an all-reduce among replicas of the shards."""
    shards, replicas = self._over(w.gathered_over), self._over(w.replicas_over)
    return self.narrow(w) * ((1 - 1 / shards) + 2 * (1 - 1 / replicas) / shards)

  def sent_outside(self, outside: Sequence[Weight], ends: Sequence[Weight]) -> float:
    """Bytes that a device sends for all weights outside of the loop over layers, `ends` among them.

    Those of a layer are gathered three times, those of the logits once, and the table of embeddings is not.
    """
    gathered, of_ends = (sum(self.to_gather(w, narrow=True) for w in each) for each in (outside, ends))
    more = max(self.logits_in_parts - 1, 0) * sum(map(self.reduced, ends)) / 2
    return 3 * (gathered - of_ends) + 0.5 * of_ends + sum(map(self.reduced, outside)) + more

  @property
  def logits_in_parts(self) -> float:
    """How many times what a scatter sends is sent for the logits' gradient in parts; 0: it is not in parts.

    It is all-reduced, in float32.
    """
    return 2 * 4 / jnp.dtype(self._config.dtype).itemsize if sums_logits_in_parts(self._config) else 0.0

  def gathered_between(self, w: Weight, size: float) -> float:
    """Between slices: a gather fetches the shards of other slices first, then all shards within the slice."""
    slices = self._over(w.gathered_over, self._slices)
    return size / (self._over(w.gathered_over) / slices) * (1 - 1 / slices)

  def reduced_between(self, w: Weight) -> float:
    """Between slices: for the weight's reduction, and for that among replicas."""
    replicas = 2 * (1 - 1 / self._over(w.replicas_over, self._slices)) * self.narrow(w) / self._over(w.gathered_over)
    return self.gathered_between(w, self.narrow(w)) + replicas

  def stored_narrow(self, w: Weight) -> float:
    """Of a device's shard, as `narrow`."""
    return self.shard(w, self.narrow(w))

  def reduced_over_stages(self, w: Weight) -> float:
    """Between slices: for the sum over the stages' copies of a weight outside of the pipeline."""
    return 2 * (1 - 1 / self._slices["stage"]) * self.stored_narrow(w)

  def kernels(self, w: Weight) -> bool:
    """Whether Pallas kernels read it."""
    return w.of_experts and bool(self._config.sparse_matmul)

  def all_devices(self, w: Weight) -> bool:
    """Whether all devices of the mesh together shard it."""
    return self._over(w.gathered_over) == self._mesh.size

  def two_devices(self, w: Weight) -> bool:
    """Whether two devices shard it and nothing else is reduced, so that they exchange their parts."""
    return self._over(w.gathered_over) == 2 and self._over(w.replicas_over) == 1

  def in_steps(self, w: Weight) -> bool:
    """Whether the gradient is scattered over all devices, which have no ring through all of them."""
    return self.all_devices(w) and not self._along_ring and not self.within_products(w)

  def all_reduced(self, w: Weight) -> bool:
    """Whether XLA all-reduces its gradient: as `in_steps`, or its shards do not fill a TPU's tiles."""
    return self.in_steps(w) or not (w.scatters or self.within_products(w))

  def gathers_again(self, w: Weight) -> bool:
    """Whether backward gathers it twice without a pipeline."""
    return self.within_products(w) or not (self.kernels(w) or self.all_devices(w))

  def within_products(self, w: Weight) -> bool:
    """Whether XLA gathers it within the products that use it: collective matmul."""
    if self._schedule is not None or w.others <= 1 or w.of_experts or self._config.num_slices > 1:
      return False
    size = w.along * w.others * self._itemsize(w)
    return is_made(self._mesh.size, self._over(w.gathered_over), size, self._collective_from)

  def collective_matmuls(self, weights: Iterable[Weight], tokens: float) -> Iterator[CollectiveMatmul]:
    """Yields those of these weights, on a device with so many tokens."""
    for w in filter(self.within_products, weights):
      yield CollectiveMatmul(
          count=w.count,
          along=w.along,
          others=w.others,
          devices=self._mesh.size,
          hops=self._its_slice.hops if self._its_slice else 0,
          tokens=tokens,
          itemsize=self._itemsize(w),
      )

  def _itemsize(self, w: Weight) -> int:
    """Of storage or compute, whichever is narrower."""
    return min(w.dtype.itemsize, jnp.dtype(self._config.dtype).itemsize)

  def _over(self, axes: Iterable[str], sizes: Mapping[str, int] | None = None) -> int:
    return math.prod((self._mesh.shape if sizes is None else sizes)[axis] for axis in axes)


def fills(tile: Mapping[int, int], shape: Sequence[int], spec: P, kept: Collection[str], mesh: Mapping[str, int]) -> bool:
  """Returns whether a device's shard of an array is a multiple of a tile, along each axis over which it is gathered.

  `tile` has sizes of axes, counted from the last, `shape` is that of the whole array, `spec` how it is stored, and `kept`
  has the mesh axes over which it is not gathered.
  """

  def divides(axis: int, size: int) -> bool:
    over = mesh_axes(spec[-axis]) if len(shape) >= axis and len(spec) == len(shape) else ()
    return set(over) <= set(kept) or shape[-axis] // math.prod(mesh[name] for name in over) % size == 0

  return all(divides(axis, size) for axis, size in tile.items())


def gathered(layout: sharding.Layout, data_axes: Collection[str]) -> P:
  """How an array is sharded once it is gathered over the axes that shard data."""
  spec, names = layout.sharding.spec, layout.resolution.names if layout.resolution else None
  return sharding.gathered_spec(spec, names, data_axes) if names is not None and len(names) == len(spec) else spec


def axes_of(spec: P) -> set[str]:
  """Returns the mesh axes in a PartitionSpec."""
  return {axis for entry in spec for axis in mesh_axes(entry)}


def shards(names: Sequence[str], config: DerivedKeys, mesh: AbstractMesh, *, over_stages: bool = False) -> int:
  """Returns how many shards an array with these logical axes has; those over stages do not count, unless they should."""
  return _shards(tuple(names), read_rules(config.logical_axis_rules), mesh, over_stages)


@functools.lru_cache(maxsize=1024)
def _shards(names: tuple[str, ...], rules: Rules, mesh: AbstractMesh, over_stages: bool) -> int:
  axes = axes_of(resolve(names, mesh, rules))
  return math.prod(mesh.shape[axis] for axis in axes if over_stages or axis != "stage")


def _moments(config: DerivedKeys, parameters: sharding.Explanation) -> int:
  if plain(config.opt_type) not in ADAMS:
    return 0
  first = jnp.dtype(config.mu_dtype).itemsize if config.mu_dtype else None
  return round(
      sum(row.bytes_per_device * (1 + (first / row.layout.dtype.itemsize if first else 1)) for row in parameters.rows)
  )

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The weights of a config's model, as one device has them."""

from collections.abc import Collection, Iterator, Mapping, Sequence
import dataclasses
import functools
import math
import re
from typing import Any

import jax.numpy as jnp
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P
import numpy as np

from maxtext_pp_ext import sharding
from maxtext_pp_ext.config.derived import collective_matmul_from
from maxtext_pp_ext.config.keys import DerivedKeys
from maxtext_pp_ext.config.view import plain
from maxtext_pp_ext.hardware import tiles
from maxtext_pp_ext.hardware.collective_matmul import CollectiveMatmul, is_made
from maxtext_pp_ext.hardware.torus import is_one_ring, Slice
from maxtext_pp_ext.host.models import abstract_model
from maxtext_pp_ext.host.models.axes import ACTIVATION_AXES, data_mesh_axes
from maxtext_pp_ext.plan.costs import OwnLoop
from maxtext_pp_ext.schedule import CircularSchedule
from maxtext_pp_ext.sharding.resolve import LogicalAxes, mesh_axes, read_rules, resolve, Rules

# What weights have in common -> elements of all layers stacked in them, sharded as a stage computes with them.
Counts = Mapping["Weight", float]
# The optimizers whose moments are known.
ADAMS = ("adamw", "adam_pax")


@dataclasses.dataclass(frozen=True)
class Weight:
  """What arrays of weights on a device have in common."""

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
  first: bool  # whether that is the first dimension of a layer's weight


_STACK = re.compile("layers|scanned_blocks|circular_repeats")  # in the name of a dimension along which layers are stacked
# Paths of the table of embeddings, of all tables whose rows are looked up, and of the logits' weight.
_TABLE, _LOGITS = "token_embedder/", "decoder/logits_dense/"
_TABLES = f"{_TABLE}|decoder/position_embedder/|decoder/per_layer_embedder/embed_tokens"


class Weights:
  """The arrays of weights of a config's model on one device: how they are sharded, and bytes of their moments."""

  def __init__(self, config: DerivedKeys, parameters: sharding.Explanation, mesh: AbstractMesh):
    self.parameters, self.mesh, self.moments = parameters, mesh, _moments(config, parameters)
    self._data_axes = data_mesh_axes(mesh, config.logical_axis_rules)
    self._of_batch = axes_of(resolve(ACTIVATION_AXES[:2], mesh, config.logical_axis_rules)) - {"stage"}
    self._parted: dict[re.Pattern, tuple[Counts, Counts]] = {}

  def parted(self, inside: re.Pattern) -> tuple[Counts, Counts]:
    """Returns (the weights whose paths match, the others)."""
    if inside not in self._parted:  # a plan asks for each number of microbatches
      counts: tuple[dict[Weight, float], dict[Weight, float]] = ({}, {})
      for path, count, of_stage, shared in self._rows:
        outside = not inside.match(path)
        weight = shared if outside else of_stage
        counts[outside][weight] = counts[outside].get(weight, 0.0) + count
      self._parted[inside] = counts
    return self._parted[inside]

  def ends(self, inside: re.Pattern) -> tuple[Counts, Counts, Counts]:
    """Returns (tables of embeddings, the logits' weight, which may be one of them, what else is outside)."""
    tables, table, logits = (self.parted(re.compile(f"(?!{paths})"))[1] for paths in (_TABLES, _TABLE, _LOGITS))
    return tables, logits or table, self.parted(re.compile(f"{inside.pattern}|{_TABLES}|{_LOGITS}"))[1]

  @functools.cached_property
  def _rows(self) -> list[tuple[str, float, Weight, Weight]]:
    """Of each array its path, its count, and its weight if it is inside of a pipeline and if not."""
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
    stacked = [bool(_STACK.search(str(name))) for name in names or ()]
    layers = math.prod(size for size, is_stack in zip(layout.shape, stacked, strict=False) if is_stack)
    weight = Weight(
        layout.dtype,
        frozenset(all_axes - kept_axes),
        frozenset(self._of_batch - all_axes),
        of_experts="exp" in (names or ()),
        # Shards that are no multiple of the lanes would be padded there.
        in_lanes=fills({1: tiles.LANES}, layout.shape, spec, kept_axes, shape),
        scatters=fills(tiles.REDUCE_SCATTERED, layout.shape, spec, kept_axes, shape),
        along=length,
        others=count / layers / length if length else 0.0,
        first=bool(along) and sum(stacked[: along[0]]) == along[0],
    )
    shared = weight.replicas_over | ({"stage"} & set(shape)) - all_axes  # the stages share what is outside the pipeline
    return count, weight, dataclasses.replace(weight, replicas_over=shared)


class Columns:
  """Weights on a device, in arrays with a value for each: bytes, those of transfers as it sends them, and what holds.

  Collective matmuls count in MaxText's own loop and outside of loops, not those of `circular`. With one microbatch of
  another schedule a gradient is no sum over microbatches. `its_slice` says whether one ring goes through all devices.
  """

  def __init__(
      self,
      config: DerivedKeys,
      mesh: AbstractMesh,
      schedule: CircularSchedule,
      its_slice: Slice | None,
      weights: Counts,
      *,
      outside: bool = False,  # of loops of ours
  ):
    own_loop = isinstance(schedule, OwnLoop)
    of = lambda name, kind=float: np.array([getattr(w, name) for w in weights], kind)
    over = lambda name, sizes: np.array([math.prod(map(sizes.__getitem__, getattr(w, name))) for w in weights], float)
    slices = dict(zip(config.mesh_axes, abstract_model.parallelism(config, "dcn"), strict=True))
    shards, replicas = over("gathered_over", mesh.shape), over("replicas_over", mesh.shape)
    slices_of_shards, slices_of_replicas = over("gathered_over", slices), over("replicas_over", slices)
    stored_itemsize = np.array([w.dtype.itemsize for w in weights], float)
    self._mesh, self._its_slice, self._weights = mesh, its_slice, weights
    self.shards, self.replicas, self.within_slice = shards, replicas, shards / slices_of_shards
    self.count, self.of_experts = np.array([*weights.values()], float), of("of_experts", bool)
    # Of storage or compute, whichever is narrower.
    self.itemsize = np.minimum(stored_itemsize, jnp.dtype(config.dtype).itemsize)

    self.stored, self.narrow = self.count * stored_itemsize, self.count * self.itemsize
    self.gathered = self.stored if config.pipeline_gather_dtype == "weight" else self.narrow
    # Of the gradient, as it is summed over microbatches.
    self.summed = self.gathered if schedule.microbatches == 1 and not own_loop else self.stored
    if config.pipeline_grad_accum_dtype != "auto":
      self.summed = self.count * jnp.dtype(config.pipeline_grad_accum_dtype).itemsize
    # The values of a device's shard that are cast before it gathers.
    self.cast = np.where(self.gathered == self.stored, 0.0, self.count / shards)
    self.to_gather, self.to_gather_narrow = (size - size / shards for size in (self.gathered, self.narrow))
    # A reduce-scatter over the axes that shard the weight, then an all-reduce among replicas of the shards.
    self.among_replicas = self.narrow * 2 * (1 - 1 / replicas) / shards
    self.reduced = self.to_gather_narrow + self.among_replicas
    # Between slices: a gather fetches the shards of other slices first, then all shards within the slice.
    between = (1 - 1 / slices_of_shards) / self.within_slice
    self.gathered_between, self.narrow_between = self.gathered * between, self.narrow * between
    self.among_replicas_between = self.narrow * 2 * (1 - 1 / slices_of_replicas) / shards
    self.reduced_between = self.narrow_between + self.among_replicas_between
    # And for the sum over the stages' copies of a weight outside of the pipeline.
    self.reduced_over_stages = 2 * (1 - 1 / slices.get("stage", 1)) * self.narrow / shards

    self.first = of("first", bool)
    self.kernels = self.of_experts & bool(config.sparse_matmul)  # Pallas kernels read it
    self.transposed = self.kernels & ~of("in_lanes", bool)  # before they do
    # Two devices shard it and nothing else is reduced, so that they exchange their parts.
    self.two_devices = (shards == 2) & (replicas == 1)
    # XLA gathers it within the products that use it: collective matmul.
    sizes, threshold = of("along") * of("others") * self.itemsize, collective_matmul_from(config)
    made = [is_made(mesh.size, *each, threshold) for each in zip(shards, sizes, strict=True)]
    possible = (own_loop or outside) and config.num_slices == 1
    self.within_products = np.array(made, bool) & possible & (of("others") > 1) & ~self.of_experts
    # The gradient is scattered over all devices, which have no ring through all of them.
    along_ring = config.num_slices == 1 and its_slice is not None and is_one_ring(its_slice.lengths)
    self.in_steps = (shards == mesh.size) & ~self.within_products & (not along_ring)
    # XLA all-reduces its gradient: as `in_steps`, or its shards do not fill a TPU's tiles.
    self.all_reduced = self.in_steps | ~(of("scatters", bool) | self.within_products)
    # Backward gathers it twice without a pipeline.
    self.gathers_again = self.within_products | ~(self.kernels | (shards == mesh.size))

  def collective_matmuls(self, tokens: float) -> Iterator[CollectiveMatmul]:
    """Yields those of these weights, on a device with so many tokens."""
    for (w, count), itemsize, within in zip(self._weights.items(), self.itemsize, self.within_products, strict=True):
      if within:
        yield CollectiveMatmul(
            count=count,
            along=w.along,
            others=w.others,
            devices=self._mesh.size,
            hops=self._its_slice.hops if self._its_slice else 0,
            tokens=tokens,
            itemsize=int(itemsize),
        )


@dataclasses.dataclass(frozen=True)
class Ends:
  """Weights outside of the layers, or of the loops of ours. With `logits_via_embedding` a table is the logits' weight."""

  tables: Columns  # of embeddings
  logits: Columns
  others: Columns
  in_products: bool = False  # whether the tables are multiplied with one-hot rows, and not looked up
  # What a sum over parts of the logits makes of each byte of their weight's gradient, which is all-reduced in float32;
  # 0: there are no parts.
  in_parts: float = 0.0

  @property
  def head(self) -> int:
    """Bytes of the logits' weight, gathered, or of its gradient before it is reduced."""
    return round(np.sum(self.logits.narrow))

  @property
  def sent(self) -> float:
    """Bytes that a device sends in a step for these weights and their gradients.

    The others are gathered three times, as layers are, the logits' weight once, for forward and backward. A table that is
    looked up is not, nor is its gradient reduced but among replicas of its shards: tokens travel instead, which are not
    counted. So the gradient is reduced among them twice if the table is the logits' weight, too.
    """
    of_logits, of_tables = _once(self.logits), self.tables.among_replicas
    if self.in_parts:
      devices = self.logits.shards * self.logits.replicas
      of_logits = self.logits.to_gather_narrow + self.in_parts * self.logits.narrow * (1 - 1 / devices)
    of_others = 3 * self.others.to_gather_narrow + self.others.reduced
    return sum(map(np.sum, (of_others, of_logits, _once(self.tables) if self.in_products else of_tables)))

  @property
  def between_slices(self) -> float:
    """Of what is sent, bytes over the data-centre network; of the others only gradients."""
    in_products = 2.0 if self.in_products else 0.0
    of_tables = self.tables.among_replicas_between + in_products * self.tables.narrow_between
    of_logits = self.logits.among_replicas_between + 2 * self.logits.narrow_between
    return sum(map(np.sum, (self.others.reduced_between, of_tables, of_logits)))

  @property
  def added_up(self) -> tuple[int, int]:
    """Bytes of the gradient of the logits' weight that stages add up, and of what a device sends for that."""
    return round(np.sum(self.logits.narrow / self.logits.shards)), round(np.sum(self.logits.reduced_over_stages))

  def beside(self, logits: int, *, is_fused: bool) -> int:
    """Bytes that backward of logits of so many bytes takes beside them.

    A collective matmul reads the logits' gradient from memory. Other products compute that gradient themselves if
    `is_fused`. Then there is only the gradient of the weights, whole.
    """
    if np.any(self.logits.within_products):
      return logits
    return self.head if is_fused else max(logits, self.head)


def _once(weights: Columns) -> np.ndarray:
  """What is sent of weights that are gathered once, and of their gradients, which products compute."""
  return weights.to_gather_narrow * (2 + weights.all_reduced) + weights.among_replicas


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

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The layouts of one parameter: as it is stored, as a stage computes with it, and as its gradient is summed."""

from collections.abc import Callable, Sequence
import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from maxtext_pp_ext.engine.per_stage import Layout
from maxtext_pp_ext.engine.programs.roots import BatchSplit
from maxtext_pp_ext.engine.transfers.memory_order import as_stored
from maxtext_pp_ext.engine.transfers.torus import chip_of, lengths, rings, slices_along, Steps
from maxtext_pp_ext.engine.transfers.transfer import Transfer
from maxtext_pp_ext.hardware import torus
from maxtext_pp_ext.sharding import constrain
from maxtext_pp_ext.sharding.resolve import mesh_axes


class Combination(NamedTuple):
  """How the gradients of a weight from several microbatches are combined."""

  # (a, b) -> their combination, elementwise, associative and commutative
  add: Callable[[jax.Array, jax.Array], jax.Array]
  nothing: float  # the neutral value of `add`; accumulators begin with it and bubbles contribute it


SUM = Combination(jnp.add, 0.0)
# For state whose "gradient" is its next value, computed from the largest element of an activation: Flax's fp8 scales and
# amax histories. The next value for all microbatches is the largest of theirs; Flax's dtype for such state, fm32, also
# adds by taking the maximum.
MAX = Combination(jnp.maximum, -math.inf)


def memory(mesh: Mesh, spec: P, shape: tuple[int, ...], dtype: jnp.dtype, behind: jax.Array | None = None) -> jax.Array:
  """Memory with any values, in a layout. If `behind`, a number, is given, it is not taken before this is computed.

  `jax.lax.empty` depends on nothing: the TPU compiler may take it when the step begins. So this number is written: at
  the first index, or everywhere if that is one device's. Two memories behind the same number may begin as one, of which
  copies are made.
  """
  taken = jax.lax.empty(shape, dtype)
  if behind is not None:
    is_divided = bool(mesh_axes(spec[0]))
    written = jnp.broadcast_to(behind.astype(dtype), (shape[0] if is_divided else 1, *shape[1:]))
    taken = jax.lax.dynamic_update_slice_in_dim(taken, written, 0, axis=0)
  return constrain(taken, spec, mesh)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightLayout:
  """Layouts and dtypes of one parameter [R, S, …]. Specs are those of one repeat, [S, …]."""

  sharded: P  # PartitionSpec of the stored parameter; in an entry of several mesh axes, those to be gathered come last
  gathered: P  # PartitionSpec of the parameter as a stage computes with it
  # mesh axes over which an iteration's gradient is left as a partial sum, with one part per device along a leading axis
  # (see `programs/partial.py`); empty if the gradient is complete
  partial_axes: tuple[str, ...]
  compute_dtype: jnp.dtype  # dtype in which the parameter is gathered and passed to the stage
  accumulation_dtype: jnp.dtype  # dtype in which the gradient is summed over the microbatches of a repeat
  steps: Steps = ()  # the steps in which the weight is gathered over some mesh axes (`torus.py`); over others at once
  # how gradients of microbatches are combined. Anything but SUM has no partial sums: `partial_axes` must be empty.
  combine: Combination = SUM

  @property
  def gathered_axes(self) -> tuple[tuple[str, ...], ...]:
    """For each dimension except the stages', the mesh axes over which the weight is gathered."""
    kept = [mesh_axes(entry) for entry in self.gathered[1:]]
    return tuple(tuple(a for a in mesh_axes(all_) if a not in kept[k]) for k, all_ in enumerate(self.sharded[1:]))

  @property
  def needs_gather(self) -> bool:
    """Whether the weight has to be gathered over any mesh axis."""
    return any(self.gathered_axes)

  @property
  def by_device(self) -> Layout:
    """[F, S, …]: like `gathered`, but with a separate part on each of the F devices along `partial_axes`."""
    return Layout(P(self.partial_axes, *self.gathered), 1)

  @property
  def buffers(self) -> Layout:
    """[B, F, S, …]: B arrays laid out `by_device`."""
    return Layout(P(None, *self.by_device.spec), 2)

  @property
  def stored(self) -> Layout:
    """[R, S, …]: all repeats, as the parameter is stored."""
    return Layout(P(None, *self.sharded), 1)

  def chunk(self, transfer: Transfer) -> Layout:
    """[F, S, …]: chunks of arrays laid out `by_device`."""
    return Layout(P(self.partial_axes, self.gathered[0], *transfer.chunk_spec(self.gathered[1:])), 1)

  def scattered(self, transfer: Transfer) -> Layout:
    """[F, S, …]: chunks that are scattered, one on each device along `transfer.summed_after`."""
    return Layout(P(transfer.summed_after, *self.sharded), 1)

  def parts(self, mesh: Mesh) -> int:
    """F, the number of parts along `partial_axes`."""
    return math.prod(mesh.shape[a] for a in self.partial_axes)

  def by_device_like(
      self, mesh: Mesh, shape: tuple[int, ...], dtype: jnp.dtype, behind: jax.Array | None = None
  ) -> jax.Array:
    """Memory for [F, S, …] in the layout `by_device`, for a weight of the shape [S, …]; `behind` as in `memory`."""
    return memory(mesh, self.by_device.spec, (self.parts(mesh), *shape), dtype, behind)

  def transfer(self, mesh: Mesh, shape: tuple[int, ...], chunks: int) -> Transfer:
    """How a parameter of this shape, [R, S, …], is transferred in `chunks` chunks."""
    sharded = [math.prod(mesh.shape[a] for a in mesh_axes(entry)) for entry in self.sharded[1:]]
    shard = tuple(size // sharded[k] for k, size in enumerate(shape[2:]))
    devices = tuple(math.prod(mesh.shape[a] for a in axes) for axes in self.gathered_axes)
    # One ring goes through the devices of one axis, as JAX orders them.
    is_one_ring = mesh.size in mesh.shape.values() and torus.is_one_ring(lengths(mesh))
    size = math.prod(shard) // chunks * self.compute_dtype.itemsize
    chip = chip_of(mesh)
    over = {axis: slices_along(mesh, axis) for axes in self.gathered_axes for axis in axes}
    slices = tuple((axis, count) for axis, count in over.items() if count > 1)
    whole = tuple(axis for axis in self.partial_axes if axis not in over)
    after = whole if any(slices_along(mesh, axis) > 1 for axis in whole) else ()
    return Transfer(
        axes=self.gathered_axes,
        shard=shard,
        chunks=chunks,
        devices=devices,
        slices=slices,
        summed_after=after,
        scatters_in_steps=math.prod(devices) == mesh.size and not is_one_ring,
        steps=self.steps,
        rings=tuple(axis for axis in rings(mesh) if axis in over),
        gathers_beside_compute=chip is not None and chip.gathers_beside_compute and not slices,
        along_ring=mesh.size in devices and is_one_ring and size >= torus.LEAST_ALONG_RING,
        # an abstract mesh has no devices
        order=as_stored(shard) if isinstance(mesh, Mesh) and mesh.devices.flat[0].platform == "tpu" else (),
    )

  def batch_splits(
      self, mesh: Mesh, batch: Sequence[tuple[int, tuple[str, ...]]], row_groups: int = 1
  ) -> list[BatchSplit]:
    """How to split the batch so that the gradient is left as a partial sum.

    Args:
      mesh: the device mesh.
      batch: (size, mesh axes) of the axes of rows and sequence.
      row_groups: the number of groups of rows into which layers split a microbatch.
    """
    owned = {a for entry in self.gathered for a in mesh_axes(entry)}
    # A weight may stay sharded over an axis that also shards the batch (experts). Then an operation outside of a
    # shard_map also sums over that axis, and the compiler must be free to choose how.
    whole = any(a in owned for _, axes in batch for a in axes)
    found = []
    for k, (size, axes) in enumerate(batch):
      partial = tuple(a for a in axes if a in self.partial_axes)
      parts = math.prod(mesh.shape[a] for a in partial)
      found.append(BatchSplit(None if whole else size, parts, size if k else size // row_groups, partial))
    return found

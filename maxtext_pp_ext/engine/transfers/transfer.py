# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""All-gathers of a weight's shards and reduce-scatters of its gradient, in chunks.

A stage works on one repeat for M iterations. In each of them one of M chunks of another repeat is gathered, or reduced
and scattered, while the stage computes. Everything here acts on the local arrays of one stage on one device, inside a
`shard_map`.
"""

from collections.abc import Collection, Sequence
import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from maxtext_pp_ext.engine.transfers import collectives
from maxtext_pp_ext.engine.transfers.memory_order import in_memory
from maxtext_pp_ext.engine.transfers.torus import Steps
from maxtext_pp_ext.hardware.tiles import OF_16_BITS as TILE

# The share by which all chunks together may exceed the whole, if that makes them easier to copy.
_SLACK = 1 / 16


def _least_in_steps(chunks: int) -> int:
  """The number of elements from which on a gather is worth its steps. Each step needs an operation beside which it runs.

  Of a weight in one chunk smaller gathers are worth it, too. The TPU compiler (libtpu 0.0.48.1; benchmarks.workarounds
  small_gather) makes an all-reduce of a small one over 64 devices or more (v6e-64: up to 16 MiB), which sends twice as
  much.
  """
  return 2**20 if chunks == 1 else 2**24


class Cut(NamedTuple):
  """Chunks along one dimension of the shard. If they do not divide it evenly, the last one overlaps the one before."""

  dim: int
  size: int


@dataclasses.dataclass(frozen=True)
class Transfer:
  """How one weight is transferred."""

  axes: tuple[tuple[str, ...], ...]  # for each dimension the mesh axes over which it is sharded and has to be gathered
  shard: tuple[int, ...]  # shape of a device's shard of one stage, [a, b, …]; the gathered shape is [A, B, …]
  chunks: int  # the number of chunks into which the shard is cut
  devices: tuple[int, ...] = ()  # for each dimension the number of devices over which it has to be gathered
  scatters_in_steps: bool = False  # whether its gradient is scattered over some of the devices after others
  slices: tuple[tuple[str, int], ...] = ()  # of these axes those over several slices, and over how many
  # axes that do not shard it, if one of them goes over slices: its gradient is summed over them once it is scattered
  summed_after: tuple[str, ...] = ()
  steps: Steps = ()  # the steps in which the weight is gathered over some of these axes
  rings: tuple[str, ...] = ()  # those of these axes that go along a line, and along a ring in the minor step
  along_ring: bool = False  # whether it is gathered in one step all the same, along one ring through all devices
  gathers_beside_compute: bool = False  # whether the TPU compiler overlaps gathers with compute without any flags
  # the dimensions of the shard from major to minor in memory, as the parameter is stored; () for row-major
  order: tuple[int, ...] = ()

  @functools.cached_property
  def cut(self) -> Cut | None:
    """The cut that wastes least and is easiest to copy; None for a scalar, or one chunk: it is transferred whole.

    Chunks of whole tiles are copied without shifting rows or columns.
    """

    def cost(dim: int) -> tuple:
      size = self._chunk_size(dim)
      waste = size * self.chunks / self.shard[dim] - 1
      from_end = len(self.shard) - dim
      is_tiled = from_end <= len(TILE)
      shifts = is_tiled and size % TILE[-from_end] != 0
      return waste > _SLACK, shifts, is_tiled and self._is_gathered(dim), waste, dim

    if not self.shard or self.chunks == 1:
      return None
    dim = min(range(len(self.shard)), key=cost)
    return Cut(dim, self._chunk_size(dim))

  @property
  def moves_once(self) -> bool:
    """Whether chunks do not overlap, so that each element is transferred once."""
    return bool(self.shard) and (self.cut is None or self.cut.size * self.chunks == self.shard[self.cut.dim])

  def _chunk_size(self, dim: int) -> int:
    return -(-self.shard[dim] // self.chunks)

  def _is_gathered(self, dim: int) -> bool:
    return bool(self.axes[dim])

  def gather(
      self,
      stored: jax.Array,
      repeat: jax.Array,
      chunk: jax.Array,
      dtype: jnp.dtype,
      order: Sequence[int] = (),
  ) -> jax.Array:
    """Gathers one chunk of a repeat.

    Args:
      stored: shards of all repeats, [R, a, b, …].
      repeat: number of the repeat.
      chunk: number of the chunk, 0 … chunks − 1.
      dtype: the dtype to gather it in.
      order: the dimensions from major to minor in memory, in which one of several chunks is gathered; () for as stored.
        To change the order of a shard costs least.

    Returns:
      The chunk, [A, B, …] but for the dimension of the cut. That is [chunk], or [devices, chunk] if it is gathered.
    """
    sizes = list(self.shard)
    if self.cut is not None:
      sizes[self.cut.dim] = self.cut.size
    part = jax.lax.dynamic_slice(stored, self._starts(repeat, chunk), (1, *sizes))[0]
    if part.dtype != dtype and self.chunks > 1:
      # The factor is one. Without it the TPU compiler (libtpu 0.0.48.1; benchmarks.workarounds cast_of_all_repeats) casts
      # all repeats before the loop and keeps them. In one chunk come layers that MaxText stacks along another axis than
      # the first. The compiler copies all of them in any case, and is to cast them first.
      part = part * (repeat >= 0).astype(part.dtype)
    part = part.astype(dtype)
    if self.chunks > 1:
      # The compiler (libtpu 0.0.48.1; benchmarks.workarounds order_of_all_repeats) would copy all repeats into the order
      # in which it gathers.
      part = in_memory(part, self.order or range(part.ndim))
      part = in_memory(part, order) if order else part
    for dim, axes in enumerate(self.axes):
      if axes and not self._is_cut(dim):
        part = self._gather(part, axes, dim)
    if self.cut is not None and self._is_gathered(self.cut.dim):
      part = self._gather(jnp.expand_dims(part, self.cut.dim), self.axes[self.cut.dim], self.cut.dim)
    return part

  def _gather(self, x: jax.Array, axes: tuple[str, ...], dim: int) -> jax.Array:
    """All devices' parts of a dimension, one after the other."""
    if self.along_ring or not self._takes_steps(axes, x.size):
      if jax.lax.axis_size(axes) == 2:
        return collectives.gather_of_two(x, axes, dim)
      return jax.lax.all_gather(x, axes, axis=dim, tiled=True)
    sizes = dict(self.steps)
    for axis in reversed(axes):
      if axis in self.rings and dim == 0:
        x = collectives.gather_along_ring_last(x, axis, sizes[axis])
      else:
        x = collectives.gather_in_steps(x, axis, dim, sizes[axis])
    return x

  @property
  def in_steps(self) -> bool:
    """Whether the weight is gathered in several steps, or could be, but is gathered along one ring."""
    return any(self._takes_steps(axes, math.prod(self.shard) // self.chunks) for axes in self.axes)

  @property
  def on_sparsecores(self) -> bool:
    """Whether the weight is gathered on the SparseCores: only there `steps` are known."""
    known = {axis for axis, _ in self.steps}
    return any(axes and known.issuperset(axes) for axes in self.axes)

  @property
  def is_gather_asynchronous(self) -> bool:
    """Whether the TPU compiler overlaps the weight's gathers with compute."""
    return self.gathers_beside_compute or self.is_asynchronous

  @property
  def is_asynchronous(self) -> bool:
    """Whether the TPU compiler overlaps the weight's gathers, and its gradient's reductions, with compute.

    Without flags it does so with exchanges between two devices, and with flags that put gathers on the SparseCores, for
    which `steps` are known, with all.
    """
    known = {axis for axis, _ in self.steps}
    return all(devices <= 2 or known.issuperset(axes) for axes, devices in zip(self.axes, self.devices, strict=True))

  def _takes_steps(self, axes: tuple[str, ...], size: int) -> bool:
    """Whether parts of this size are gathered over axes of the mesh in several steps."""
    sizes = dict(self.steps)
    known = all(axis in sizes for axis in axes)
    if not known or size * math.prod(math.prod(sizes[axis]) for axis in axes) < _least_in_steps(self.chunks):
      return False
    return sum(step > 1 for axis in axes for step in sizes[axis]) > 1

  def chunk_spec(self, gathered: Sequence[Any]) -> tuple[Any, ...]:
    """The entries of a chunk's PartitionSpec, from those of the gathered weight, [A, B, …]."""
    if self.cut is None or not self._is_gathered(self.cut.dim):
      return tuple(gathered)
    return (*gathered[: self.cut.dim + 1], None, *gathered[self.cut.dim + 1 :])

  def place(self, part: jax.Array, buffers: jax.Array, number: jax.Array, chunk: jax.Array) -> jax.Array:
    """The buffers, [B, 1, A, B, …], with one chunk, the result of `gather`, in the buffer of this number."""
    starts: list[jax.Array | int] = [number, 0, *(0 for _ in part.shape)]
    if self.cut is None:
      return jax.lax.dynamic_update_slice(buffers, part[None, None], _of_one_type(starts))
    by_device = self._by_device(buffers, self.cut) if self._is_gathered(self.cut.dim) else buffers
    starts[self.cut.dim - len(self.shard)] = self._first(chunk, self.cut)
    return jax.lax.dynamic_update_slice(by_device, part[None, None], _of_one_type(starts)).reshape(buffers.shape)

  def cut_out(
      self, summands: jax.Array, number: jax.Array | int, chunk: jax.Array, order: Sequence[int] | None = None
  ) -> jax.Array:
    """One chunk of a device's summand of a gradient.

    Args:
      summands: [B, 1, A, B, …].
      number: number of the summand, 0 … B − 1.
      chunk: number of the chunk, 0 … chunks − 1.
      order: the dimensions [A, B, …] from major to minor in memory, from which the chunk is taken; None for any.

    Returns:
      [1, …]: the chunk, shaped like that of a gathered weight (`gather`).
    """
    order, at = None if order is None else list(order), None
    if self.cut is not None:
      at = 2 + self.cut.dim
      if self._is_gathered(self.cut.dim):
        summands = self._by_device(summands, self.cut)
        order = order and [k + (k > self.cut.dim) + after for k in order for after in range(1 + (k == self.cut.dim))]
        at += 1
    if order is not None:
      # Left to itself, the compiler (libtpu 0.0.48.1; benchmarks.workarounds order_of_finished_sum) may copy all of it
      # into another order first.
      summands = in_memory(summands, [0, 1, *(2 + k for k in order)])
    starts, sizes = [number, *(0 for _ in summands.shape[1:])], [1, *summands.shape[1:]]
    if self.cut is not None and at is not None:
      starts[at], sizes[at] = self._first(chunk, self.cut), self.cut.size
    return jax.lax.dynamic_slice(summands, _of_one_type(starts), sizes)[0]

  def scatter(self, part: jax.Array, sum_over: Collection[str], order: Sequence[int] = ()) -> jax.Array:
    """Adds one chunk of a gradient up over devices, but not over `summed_after`.

    Args:
      part: the chunk of this device's summand, the result of `cut_out`.
      sum_over: the mesh axes along which devices hold different summands; along the other axes they hold equal ones.
      order: the dimensions [A, B, …] of the summand from major to minor in memory; () for row-major, or any.

    Returns:
      The chunk of this device's shard, [a, b, …].
    """
    if self.cut is not None and self._is_gathered(self.cut.dim):
      dim = self.cut.dim
      # The devices' parts one after the other, each in the order of the whole.
      by_device = [dim, *(k + (k >= dim) for k in order or range(part.ndim - 1))]
      part = self._scatter(in_memory(part, by_device), dim, sum_over, tiled=False, order=by_device)
    for dim, axes in enumerate(self.axes):
      if axes and not self._is_cut(dim):
        part = self._scatter(part, dim, sum_over, tiled=True, order=order or None)
    scattered = {a for axes in self.axes for a in axes}
    rest = tuple(a for a in sum_over if a not in scattered and a not in self.summed_after)
    return jax.lax.psum(part, rest) if rest else part

  def put(self, part: jax.Array, stored: jax.Array, repeat: jax.Array, chunk: jax.Array) -> jax.Array:
    """Adds the result of `scatter` up over `summed_after`, and puts it into a repeat's place.

    Args:
      part: the chunk of this device's shard, [a, b, …].
      stored: shards of all repeats, [R, a, b, …].
      repeat: number of the repeat.
      chunk: number of the chunk, 0 … chunks − 1.

    Returns:
      `stored` with the chunk, [R, a, b, …].
    """
    part = jax.lax.psum(part, self.summed_after) if self.summed_after else part
    return jax.lax.dynamic_update_slice(stored, part[None].astype(stored.dtype), self._starts(repeat, chunk))

  def _scatter(
      self, x: jax.Array, dim: int, sum_over: Collection[str], *, tiled: bool, order: Sequence[int] | None = None
  ) -> jax.Array:
    """This device's part of a dimension of `x`, which is summed over those of its axes that are in `sum_over`."""
    axes = self.axes[dim]
    summed = tuple(a for a in axes if a in sum_over)
    if summed == axes:
      over = dict(self.slices)
      return collectives.sum_scatter(x, axes, dim, tiled=tiled, in_steps=self.scatters_in_steps, order=order, slices=over)
    x = jax.lax.psum(x, summed) if summed else x
    index = jax.lax.axis_index(axes)
    if not tiled:
      return jax.lax.dynamic_index_in_dim(x, index, dim, keepdims=False)
    size = x.shape[dim] // jax.lax.axis_size(axes)
    return jax.lax.dynamic_slice_in_dim(x, index * size, size, dim)

  def _first(self, chunk: jax.Array, cut: Cut) -> jax.Array:
    """Where a chunk begins in the shard."""
    last = self.shard[cut.dim] - cut.size
    return jnp.minimum(chunk * cut.size, last)

  def _starts(self, repeat: jax.Array, chunk: jax.Array) -> list[jax.Array]:
    first = 0 if self.cut is None else self._first(chunk, self.cut)
    return _of_one_type([repeat, *(first if self._is_cut(dim) else 0 for dim in range(len(self.shard)))])

  def _is_cut(self, dim: int) -> bool:
    return self.cut is not None and dim == self.cut.dim

  def _by_device(self, gathered: jax.Array, cut: Cut) -> jax.Array:
    """[…, devices · a, …] -> […, devices, a, …] at the dimension of the cut."""
    dim = gathered.ndim - len(self.shard) + cut.dim
    return gathered.reshape(*gathered.shape[:dim], -1, self.shard[cut.dim], *gathered.shape[dim + 1 :])


def _of_one_type(starts: Sequence[jax.Array | int]) -> list[jax.Array]:
  """Indices of a slice as JAX wants them. With `jax_enable_x64` a Python integer would be int64 beside our int32."""
  return [jnp.asarray(start, jnp.int32) for start in starts]

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""All-gathers of a weight's shards and reduce-scatters of its gradient, in pieces.

A stage works on one repeat for M iterations. In each of them one of M pieces of another repeat is gathered, or reduced
and scattered, while the stage computes. Everything here acts on the local arrays of one stage on one device, inside a
`shard_map`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from maxtext_pp_ext.engine.memory_order import in_memory
from maxtext_pp_ext.engine.torus import groups, Steps

# The shape of a TPU tile of 16-bit values. Pieces whose sizes are multiples of it are copied without shifting rows or
# columns.
_TILE = (16, 128)
# The share by which all pieces together may exceed the whole, if that makes them easier to copy.
_SLACK = 1 / 16
# The number of elements from which on a gather is worth its steps. Each step needs an operation beside which it runs.
_LEAST_IN_STEPS = 2**24


class Cut(NamedTuple):
  """Pieces along one dimension of the shard. If they do not divide it evenly, the last one overlaps the one before."""

  dim: int
  size: int


@dataclasses.dataclass(frozen=True)
class Transfer:
  """How one weight is transferred.

  Attributes:
    axes: for each dimension the mesh axes over which it is sharded and has to be gathered.
    shard: shape of a device's shard of one stage, [a, b, …]; the gathered shape is [A, B, …].
    pieces: the number of pieces into which the shard is cut.
    over_all_devices: whether these axes are the whole mesh.
    steps: the steps in which the weight is gathered over some of these axes.
  """

  axes: tuple[tuple[str, ...], ...]
  shard: tuple[int, ...]
  pieces: int
  over_all_devices: bool = False
  steps: Steps = ()

  @functools.cached_property
  def cut(self) -> Cut | None:
    """The cut that wastes least and is easiest to copy; None for a scalar, or one piece: it is transferred whole."""

    def cost(dim: int) -> tuple:
      size = self._piece_size(dim)
      waste = size * self.pieces / self.shard[dim] - 1
      from_end = len(self.shard) - dim
      is_tiled = from_end <= len(_TILE)
      shifts = is_tiled and size % _TILE[-from_end] != 0
      return waste > _SLACK, shifts, is_tiled and self._is_gathered(dim), waste, dim

    if not self.shard or self.pieces == 1:
      return None
    dim = min(range(len(self.shard)), key=cost)
    return Cut(dim, self._piece_size(dim))

  @property
  def moves_once(self) -> bool:
    """Whether pieces do not overlap, so that each element is transferred once."""
    return bool(self.shard) and (self.cut is None or self.cut.size * self.pieces == self.shard[self.cut.dim])

  def _piece_size(self, dim: int) -> int:
    return -(-self.shard[dim] // self.pieces)

  def _is_gathered(self, dim: int) -> bool:
    return bool(self.axes[dim])

  def gather(self, stored: jax.Array, repeat: jax.Array, piece: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Gathers one piece of a repeat.

    Args:
      stored: shards of all repeats, [R, a, b, …].
      repeat: number of the repeat.
      piece: number of the piece, 0 … pieces − 1.
      dtype: the dtype to gather it in.

    Returns:
      The piece, [A, B, …] but for the dimension of the cut. That is [piece], or [devices, piece] if it is gathered.
    """
    sizes = list(self.shard)
    if self.cut is not None:
      sizes[self.cut.dim] = self.cut.size
    part = jax.lax.dynamic_slice(stored, self._starts(repeat, piece), (1, *sizes))[0]
    if part.dtype != dtype and self.pieces > 1:
      # The factor is one. Without it the TPU compiler (libtpu 0.0.48.1) casts all repeats before the loop and keeps them.
      # In one piece come layers that MaxText stacks along another axis than the first. The compiler copies all of them in
      # any case, and is to cast them first.
      part = part * (repeat >= 0).astype(part.dtype)
    part = part.astype(dtype)
    for dim, axes in enumerate(self.axes):
      if axes and not self._is_cut(dim):
        part = self._gather(part, axes, dim)
    if self.cut is not None and self._is_gathered(self.cut.dim):
      part = self._gather(jnp.expand_dims(part, self.cut.dim), self.axes[self.cut.dim], self.cut.dim)
    return part

  def _gather(self, x: jax.Array, axes: tuple[str, ...], dim: int) -> jax.Array:
    """All devices' parts of a dimension, one after the other."""
    for axis, each in self._steps(axes, x.size):
      if each is None and jax.lax.axis_size(axis) == 2:
        x = _gather_of_two(x, axis, dim)
      else:
        x = jax.lax.all_gather(x, axis, axis=dim, tiled=True, axis_index_groups=each)
    return x

  @property
  def in_steps(self) -> bool:
    """Whether the weight is gathered in several steps."""
    return any(len(self._steps(axes, math.prod(self.shard) // self.pieces)) > 1 for axes in self.axes)

  def _steps(self, axes: tuple[str, ...], size: int) -> list[tuple[Any, list[list[int]] | None]]:
    """(axes, groups of devices) of each step in which parts of this size are gathered over axes of the mesh."""
    sizes = dict(self.steps)
    known = all(axis in sizes for axis in axes)
    if not known or size * math.prod(math.prod(sizes[axis]) for axis in axes) < _LEAST_IN_STEPS:
      return [(axes, None)]
    steps: list[tuple[Any, list[list[int]] | None]]
    steps = [(axis, each) for axis in axes for each in groups(sizes[axis]) if len(each[0]) > 1]
    return steps[::-1] if len(steps) > 1 else [(axes, None)]

  def piece_spec(self, gathered: Sequence[Any]) -> tuple[Any, ...]:
    """The entries of a piece's PartitionSpec, from those of the gathered weight, [A, B, …]."""
    if self.cut is None or not self._is_gathered(self.cut.dim):
      return tuple(gathered)
    return (*gathered[: self.cut.dim + 1], None, *gathered[self.cut.dim + 1 :])

  def place(self, part: jax.Array, buffers: jax.Array, number: jax.Array, piece: jax.Array) -> jax.Array:
    """Puts one piece into a buffer.

    Args:
      part: the result of `gather`.
      buffers: [B, 1, A, B, …].
      number: number of the buffer.
      piece: number of the piece, 0 … pieces − 1.

    Returns:
      The buffers with the piece.
    """
    starts: list[jax.Array | int] = [number, 0, *(0 for _ in part.shape)]
    if self.cut is None:
      return jax.lax.dynamic_update_slice(buffers, part[None, None], starts)
    by_device = self._by_device(buffers, self.cut.dim - len(self.shard)) if self._is_gathered(self.cut.dim) else buffers
    starts[self.cut.dim - len(self.shard)] = self._first(piece, self.cut)
    return jax.lax.dynamic_update_slice(by_device, part[None, None], starts).reshape(buffers.shape)

  def cut_out(self, summand: jax.Array, piece: jax.Array) -> jax.Array:
    """One piece of a device's summand of a gradient.

    Args:
      summand: [A, B, …].
      piece: number of the piece, 0 … pieces − 1.

    Returns:
      The piece, shaped like that of a gathered weight (`gather`).
    """
    if self.cut is None:
      return summand
    by_device = self._is_gathered(self.cut.dim)
    whole = self._by_device(summand, self.cut.dim) if by_device else summand
    first = self._first(piece, self.cut)
    return jax.lax.dynamic_slice_in_dim(whole, first, self.cut.size, self.cut.dim + by_device)

  def reduce(
      self,
      part: jax.Array,
      sum_over: Collection[str],
      stored: jax.Array,
      repeat: jax.Array,
      piece: jax.Array,
      order: Sequence[int] | None = None,
  ) -> jax.Array:
    """Adds one piece of a gradient up over devices and puts each device's shard of the sum into a repeat's place.

    Args:
      part: the piece of this device's summand, the result of `cut_out`.
      sum_over: the mesh axes along which devices hold different summands; along the other axes they hold equal ones.
      stored: shards of all repeats, [R, a, b, …].
      repeat: number of the repeat.
      piece: number of the piece, 0 … pieces − 1.
      order: the dimensions of an only piece, from major to minor in memory; None for any.

    Returns:
      `stored` with the piece, [R, a, b, …].
    """
    if self.cut is not None and self._is_gathered(self.cut.dim):
      part = self._scatter(part, self.cut.dim, sum_over, tiled=False)
    for dim, axes in enumerate(self.axes):
      if axes and not self._is_cut(dim):
        part = self._scatter(part, dim, sum_over, tiled=True, order=order)
    scattered = {a for axes in self.axes for a in axes}
    rest = tuple(a for a in sum_over if a not in scattered)
    part = jax.lax.psum(part, rest) if rest else part
    return jax.lax.dynamic_update_slice(stored, part[None].astype(stored.dtype), self._starts(repeat, piece))

  def _scatter(
      self, x: jax.Array, dim: int, sum_over: Collection[str], *, tiled: bool, order: Sequence[int] | None = None
  ) -> jax.Array:
    """This device's part of a dimension of `x`, which is summed over those of its axes that are in `sum_over`."""
    axes = self.axes[dim]
    summed = tuple(a for a in axes if a in sum_over)
    if summed == axes:
      return _sum_scatter(x, axes, dim, tiled=tiled, in_steps=self.over_all_devices, order=order)
    x = jax.lax.psum(x, summed) if summed else x
    index = jax.lax.axis_index(axes)
    if not tiled:
      return jax.lax.dynamic_index_in_dim(x, index, dim, keepdims=False)
    size = x.shape[dim] // jax.lax.axis_size(axes)
    return jax.lax.dynamic_slice_in_dim(x, index * size, size, dim)

  def _first(self, piece: jax.Array, cut: Cut) -> jax.Array:
    """Where a piece begins in the shard."""
    last = self.shard[cut.dim] - cut.size
    return jnp.minimum(piece * cut.size, last)

  def _starts(self, repeat: jax.Array, piece: jax.Array) -> list[jax.Array | int]:
    first = 0 if self.cut is None else self._first(piece, self.cut)
    return [repeat, *(first if self._is_cut(dim) else 0 for dim in range(len(self.shard)))]

  def _is_cut(self, dim: int) -> bool:
    return self.cut is not None and dim == self.cut.dim

  def _by_device(self, gathered: jax.Array, dim: int) -> jax.Array:
    """[…, devices · a, …] -> […, devices, a, …] at a dimension."""
    dim %= gathered.ndim
    size = self.shard[dim - gathered.ndim + len(self.shard)]
    return gathered.reshape(*gathered.shape[:dim], -1, size, *gathered.shape[dim + 1 :])


def _sum_scatter(
    x: jax.Array,
    axes: tuple[str, ...],
    dim: int,
    *,
    tiled: bool,
    in_steps: bool,
    order: Sequence[int] | None = None,
) -> jax.Array:
  """`jax.lax.psum_scatter`; in two steps or more, each over some of the devices, if `in_steps`.

  The TPU compiler (libtpu 0.0.48.1) makes an all-reduce of a reduce-scatter over all devices, which sends twice as much.
  It also does so where parts are no whole tiles. These are scattered along the major dimension in memory.
  """
  several = [axis for axis in axes if jax.lax.axis_size(axis) > 1]
  if not tiled and several and (in_steps or jax.lax.axis_size(axes) == 2):
    return jnp.squeeze(_sum_scatter(x, axes, dim, tiled=True, in_steps=in_steps), dim)
  if jax.lax.axis_size(axes) == 2:
    return _sum_scatter_of_two(x, axes, dim)
  outermost = [dim, *(other for other in order or range(x.ndim) if other != dim)]
  uneven = tiled and not _is_whole_tiles(x, dim, axes, order or range(x.ndim))
  if not in_steps or not several:
    scatter = functools.partial(jax.lax.psum_scatter, axis_name=axes, scatter_dimension=dim, tiled=tiled)
    return in_memory(scatter(in_memory(x, outermost)), outermost) if uneven else scatter(x)
  order = outermost if uneven or order is None else order
  if len(several) > 1:  # those of the first axis hold the largest parts
    for axis in several:
      x = jax.lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True)
    return x
  size = jax.lax.axis_size(several[0])
  outer = next(k for k in range(math.isqrt(size), 0, -1) if size % k == 0)
  inner = size // outer
  if outer > 1:
    major, minor = groups((outer, inner))
    x = jax.lax.psum_scatter(x, several[0], scatter_dimension=dim, tiled=True, axis_index_groups=major)
    x = in_memory(x, order)
    x = jax.lax.psum_scatter(x, several[0], scatter_dimension=dim, tiled=True, axis_index_groups=minor)
    return in_memory(x, order)
  return jax.lax.psum_scatter(x, several[0], scatter_dimension=dim, tiled=True)


# Between two devices a gather or a reduce-scatter is one exchange. The TPU compiler (libtpu 0.0.48.1) runs a permute beside
# compute without any flags, and these collectives only with flags that put them on the SparseCores.
_EXCHANGE = ((0, 1), (1, 0))


def _gather_of_two(x: jax.Array, axes: Any, dim: int) -> jax.Array:
  """`jax.lax.all_gather`, tiled, over two devices."""
  index, size = jax.lax.axis_index(axes), x.shape[dim]
  both = jax.lax.empty((*x.shape[:dim], 2 * size, *x.shape[dim + 1 :]), x.dtype)
  both = jax.lax.dynamic_update_slice_in_dim(both, x, index * size, dim)
  other = jax.lax.ppermute(x, axes, _EXCHANGE)
  return jax.lax.dynamic_update_slice_in_dim(both, other, (1 - index) * size, dim)


def _sum_scatter_of_two(x: jax.Array, axes: Any, dim: int) -> jax.Array:
  """`jax.lax.psum_scatter`, tiled, over two devices."""
  index, size = jax.lax.axis_index(axes), x.shape[dim] // 2
  own, others = (jax.lax.dynamic_slice_in_dim(x, half * size, size, dim) for half in (index, 1 - index))
  return own + jax.lax.ppermute(others, axes, _EXCHANGE)


def _is_whole_tiles(x: jax.Array, dim: int, axes: tuple[str, ...], order: Sequence[int]) -> bool:
  """Whether parts along a dimension are whole tiles in memory, where the dimensions are in this order."""
  from_end = x.ndim - list(order).index(dim)
  return x.ndim == 1 or from_end > len(_TILE) or x.shape[dim] // jax.lax.axis_size(axes) % _TILE[-from_end] == 0

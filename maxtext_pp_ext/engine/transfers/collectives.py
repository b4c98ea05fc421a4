# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Collectives of `jax.lax`, each in the form in which the TPU compiler sends least, or overlaps it with compute."""

from collections.abc import Mapping, Sequence
import functools
import math
import types
from typing import Any

import jax
import jax.numpy as jnp

from maxtext_pp_ext.engine.transfers.memory_order import in_memory
from maxtext_pp_ext.engine.transfers.torus import groups
from maxtext_pp_ext.hardware.tiles import OF_16_BITS as TILE
from maxtext_pp_ext.hardware.tiles import SUBLANES

_NO_SLICES: Mapping[str, int] = types.MappingProxyType({})


def sum_scatter(
    x: jax.Array,
    axes: tuple[str, ...],
    dim: int,
    *,
    tiled: bool,
    in_steps: bool,
    order: Sequence[int] | None = None,
    slices: Mapping[str, int] = _NO_SLICES,
) -> jax.Array:
  """`jax.lax.psum_scatter`; in two steps or more, each over some of the devices, if `in_steps`.

  The TPU compiler (libtpu 0.0.48.1; benchmarks.workarounds reduce_scatter_over_all) makes an all-reduce of a
  reduce-scatter over all devices, which sends twice as much, unless one ring goes through them. It also does so where
  parts are no whole tiles. These are scattered along the major dimension in memory.

  Args:
    x: a device's summand.
    axes: the mesh axes over which it is summed and scattered.
    dim: the dimension that is scattered.
    tiled: whether devices get equal parts of this dimension, instead of one index each.
    in_steps: whether devices of an axis, within a slice, are scattered over in two steps.
    order: the dimensions of x from major to minor in memory; None for row-major, or any.
    slices: the number of slices of the axes that go over several, one after another. x is scattered within slices
      first, so that least is sent between them.
  """
  several = [axis for axis in axes if jax.lax.axis_size(axis) > 1]
  over_slices = [axis for axis in several if slices.get(axis, 1) > 1]
  again = functools.partial(sum_scatter, in_steps=in_steps, slices=slices)
  if not tiled and several and (in_steps or over_slices or jax.lax.axis_size(axes) == 2):
    return jnp.squeeze(again(x, axes, dim, tiled=True, order=order), dim)
  if jax.lax.axis_size(axes) == 2:
    return _sum_scatter_of_two(x, axes, dim)
  given = list(order or range(x.ndim))
  outermost = [dim, *(other for other in given if other != dim)]
  uneven = tiled and not _is_whole_tiles(x, dim, axes, given)
  if over_slices:
    given = outermost if uneven else given
    first, *others = several
    if not others:
      return _sum_scatter_by_slices(x, first, dim, given, slices[first], in_steps)
    if first not in over_slices:
      x = again(x, (first,), dim, tiled=True, order=given)
      return again(x, tuple(others), dim, tiled=True, order=given)
    # Over the others first, of the part of each device along the first axis.
    x, given = _split(x, dim, jax.lax.axis_size(first)), _split_order(given, dim)
    x = again(x, tuple(others), dim + 1, tiled=True, order=given)
    return again(x, (first,), dim, tiled=False, order=given)
  if tiled and x.ndim == 2 and given[0] == dim and x.shape[dim] % (SUBLANES * jax.lax.axis_size(axes)) == 0:
    # Rows of tiles are scattered, not rows. Left to itself, the compiler (libtpu 0.0.48.1; benchmarks.workarounds
    # reduce_scatter_of_rows) may pad each device's rows to 64 or 128, and move them to their devices afterwards. It does
    # not where another dimension is the major one, and would make an all-reduce of rows of tiles there.
    tiles, by_tiles = _split(x, dim, x.shape[dim] // SUBLANES), _split_order(given, dim)
    part = again(tiles, axes, dim, tiled=True, order=order and by_tiles)
    return part.reshape(*x.shape[:dim], -1, *x.shape[dim + 1 :])
  if not in_steps or not several:
    scatter = functools.partial(jax.lax.psum_scatter, axis_name=axes, scatter_dimension=dim, tiled=tiled)
    return in_memory(scatter(in_memory(x, outermost)), outermost) if uneven else scatter(x)
  order = outermost if uneven or order is None else order
  if len(several) > 1:  # those of the first axis hold the largest parts
    for axis in several:
      x = jax.lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True)
    return x
  _, *steps = _steps(jax.lax.axis_size(several[0]), 1, in_steps)
  return _in_steps(x, several[0], dim, order, steps)


def _sum_scatter_by_slices(
    x: jax.Array, axis: str, dim: int, order: Sequence[int], slices: int, in_steps: bool
) -> jax.Array:
  """Each slice's devices get their parts of what all slices are to have, then each slice its own."""
  across, *within = _steps(jax.lax.axis_size(axis), slices, in_steps)
  x = _in_steps(_split(x, dim, slices), axis, dim + 1, _split_order(order, dim), within)
  return jnp.squeeze(jax.lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True, axis_index_groups=across), dim)


def _in_steps(x: jax.Array, axis: str, dim: int, order: Sequence[int], steps: Sequence[list[list[int]]]) -> jax.Array:
  """Summed and scattered over groups of devices, step by step."""
  for each in steps:
    x = in_memory(jax.lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True, axis_index_groups=each), order)
  return x


def _steps(size: int, slices: int, in_steps: bool) -> list[list[list[int]]]:
  """The groups of devices along an axis: those of different slices, then those of each step within a slice."""
  within = size // slices
  outer = next(k for k in range(math.isqrt(within), 0, -1) if within % k == 0) if in_steps else 1
  across, *steps = groups((slices, outer, within // outer))
  return [across, *(each for each in steps if len(each[0]) > 1)]


def _split(x: jax.Array, dim: int, parts: int) -> jax.Array:
  """A dimension of x as two, of which the first has so many parts."""
  return x.reshape(*x.shape[:dim], parts, -1, *x.shape[dim + 1 :])


def _split_order(order: Sequence[int], dim: int) -> list[int]:
  """An order of dimensions, of which one is split."""
  return [k + (k > dim) + after for k in order for after in range(1 + (k == dim))]


# Between two devices a gather or a reduce-scatter is one exchange. The TPU compiler (libtpu 0.0.48.1;
# benchmarks.workarounds exchange_of_two) runs a permute overlapped with compute without any flags, and these collectives
# only with flags that put them on the SparseCores.
_EXCHANGE = ((0, 1), (1, 0))


def gather_of_two(x: jax.Array, axes: Any, dim: int) -> jax.Array:
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


def gather_in_steps(x: jax.Array, axis: str, dim: int, sizes: Sequence[int]) -> jax.Array:
  """`jax.lax.all_gather`, tiled, over one of `torus.Steps` after another."""
  for each in reversed(groups(sizes)):
    x = jax.lax.all_gather(x, axis, axis=dim, tiled=True, axis_index_groups=each) if len(each[0]) > 1 else x
  return x


def gather_along_ring_last(x: jax.Array, axis: str, sizes: Sequence[int]) -> jax.Array:
  """`jax.lax.all_gather`, tiled, of the first dimension over an axis of `torus.rings`: over the line while x is small.

  What a line's devices have does not lie together in the whole: what the ring brings comes in between. Row-major, as
  products read a weight, the first dimension has few such pieces. Along another one the whole would be copied afterwards,
  and so would a gradient before it is scattered along the ring first.
  """
  over_line, along_ring = groups(sizes)
  x = jax.lax.all_gather(x[None], axis, axis=0, tiled=True, axis_index_groups=over_line)
  x = jax.lax.all_gather(x, axis, axis=1, tiled=True, axis_index_groups=along_ring)
  return x.reshape(-1, *x.shape[2:])


def _is_whole_tiles(x: jax.Array, dim: int, axes: tuple[str, ...], order: Sequence[int]) -> bool:
  """Whether parts along a dimension are whole tiles in memory, where the dimensions are in this order."""
  from_end = x.ndim - list(order).index(dim)
  return x.ndim == 1 or from_end > len(TILE) or x.shape[dim] // jax.lax.axis_size(axes) % TILE[-from_end] == 0

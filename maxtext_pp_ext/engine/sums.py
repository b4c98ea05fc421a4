# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Sums of gradients over the microbatches of a repeat, which each device adds up for itself."""

from __future__ import annotations

from collections.abc import Sequence
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from maxtext_pp_ext.engine.per_stage import Layout, per_stage
from maxtext_pp_ext.engine.programs.partial import Summand
from maxtext_pp_ext.engine.programs.parts_on_device import OnDevice
from maxtext_pp_ext.engine.programs.roots import BatchSplit
from maxtext_pp_ext.engine.weight_layout import WeightLayout
from maxtext_pp_ext.engine.weights import Arrays
from maxtext_pp_ext.sharding.resolve import mesh_axes


class Sums(NamedTuple):
  """Sums so far.

  Attributes:
    total: sums of the repeat that each stage is at, [F, S, …], in the dtype in which microbatches are summed; only for
      gradients that are partial sums.
    done: sums of the repeat that each stage has finished, laid out like `total`, in the compute dtype; None for a sum
      that waits in the window or, with one microbatch, in `total`.
    stored: complete sums, leaves [R, S, …], laid out as the parameters are stored; those of partial sums in the compute
      dtype, in which they are reduced.
  """

  total: Arrays
  done: list[jax.Array | None]
  stored: Arrays


class Item(NamedTuple):
  """The items that the stages are at in an iteration of backward. Arrays [S], one number for each stage.

  Attributes:
    repeat: the repeat.
    works: whether the stage is not idle. Gradients of idle stages may have any value, NaN included.
    first: whether it adds the first gradient of a repeat: in backward, that of its last item.
    finishes: whether it adds the last gradient of a repeat, and another repeat follows; None if no stage does.
  """

  repeat: jax.Array
  works: jax.Array
  first: jax.Array
  finishes: jax.Array | None


class Added(NamedTuple):
  """A gradient that has been added to a partial sum.

  Attributes:
    total: the sum so far, [F, S, …].
    waiting: where the sum waits once it is finished, with the sums of stages that have finished it; None if
      `finish_repeat` puts them there.
  """

  total: jax.Array
  waiting: jax.Array | None = None


def add_to(total: jax.Array, g: jax.Array, item: Item) -> jax.Array:
  """A sum [F, S, …] with one more gradient, [F, S, …]."""
  return _sum(total, g, _of_stages(item.first, g), _of_stages(item.works, g))


def add_and_finish(
    mesh: Mesh,
    layout: WeightLayout,
    place: Layout,
    part: OnDevice,
    total: jax.Array,
    waiting: jax.Array,
    summand: Summand,
    item: Item,
) -> Added:
  """A sum with one more gradient. The last one of a repeat is added where the sum waits for its reduction.

  Args:
    mesh: the device mesh.
    layout: of the weight.
    place: layout of `waiting`.
    part: how a device computes its part of the gradient.
    total: the sum so far, [F, S, …].
    waiting: finished sums, [F, S, …], or the weight's window, where they wait in the stage's slot.
    summand: the gradient.
    item: the items that the stages are at; `finishes` is not None.
  """
  in_window = place.stages > layout.by_device.stages

  def add(repeat, works, first, finishes, total, waiting, *operands):
    def last(total, waiting, operands):
      finished = total + part.on_device(*operands).astype(total.dtype)
      return total, put_finished(finished, waiting, repeat, in_window)

    def other(total, waiting, operands):
      return _sum(total, part.on_device(*operands), first, works), waiting

    return jax.lax.cond(finishes, last, other, total, waiting, operands)

  places = [layout.by_device, place]
  layouts = [*places, *part.layouts(layout.by_device)]
  indices: list[jax.Array] = [item.repeat, item.works, item.first, item.finishes]  # type: ignore[list-item]
  return Added(*per_stage(add, mesh, indices, [total, waiting, *summand.operands], layouts, places))


def put_finished(total: jax.Array, waiting: jax.Array, repeat: jax.Array, in_window: bool) -> jax.Array:
  """Puts a finished sum of one stage, [F, …], where it waits: in the buffer of a window that is the slot, or beside it.

  Args:
    total: the sum.
    waiting: the window's buffers, [B, F, …], or the place beside it, [F, …].
    repeat: the repeat that the stage is at.
    in_window: which of the two.
  """
  total = total.astype(waiting.dtype)
  return jax.lax.dynamic_update_index_in_dim(waiting, total, repeat % 2, 0) if in_window else total


def splits(
    mesh: Mesh, layouts: Sequence[WeightLayout], batch: Sequence[tuple[int, tuple[str, ...]]], row_groups: int = 1
) -> list[list[BatchSplit]]:
  """For each weight, how to split the batch so that its gradient is left as a partial sum.

  Args:
    mesh: the device mesh.
    layouts: one per weight.
    batch: (size, mesh axes) of the axes of rows and sequence.
    row_groups: the number of groups of rows into which layers split a microbatch.
  """

  def of(layout: WeightLayout) -> list[BatchSplit]:
    owned = {a for entry in layout.gathered for a in mesh_axes(entry)}
    parts = [math.prod(mesh.shape[a] for a in axes if a in layout.partial_axes) for _, axes in batch]
    # A weight may stay sharded over an axis that also shards the batch (experts). Then an operation outside of a
    # shard_map also sums over that axis, and the compiler must be free to choose how.
    whole = any(a in owned for _, axes in batch for a in axes)
    groups = [row_groups, *(1 for _ in batch[1:])]
    return [
        BatchSplit(None if whole else size, n, size // g, tuple(a for a in axes if a in layout.partial_axes))
        for (size, axes), n, g in zip(batch, parts, groups, strict=True)
    ]

  return [of(layout) for layout in layouts]


def _sum(total: jax.Array, g: jax.Array, first: jax.Array, works: jax.Array) -> jax.Array:
  """A sum with one more gradient. It begins anew with the first; a gradient of an idle stage does not count."""
  acc = jnp.where(first, jnp.zeros_like(total), total)
  return acc + jnp.where(works, g, jnp.zeros_like(g)).astype(acc.dtype)


def _of_stages(mask: jax.Array, x: jax.Array) -> jax.Array:
  """A mask [S] shaped to broadcast against x [F, S, …]."""
  return mask.reshape((1, -1) + (1,) * (x.ndim - 2))

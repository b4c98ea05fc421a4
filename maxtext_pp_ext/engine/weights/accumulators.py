# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Sums of gradients over the microbatches of a repeat, which each device adds up for itself."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from maxtext_pp_ext.engine.per_stage import Layout, OnDevices
from maxtext_pp_ext.engine.shapes import Accumulator, Buffers, Mask, Numbers


class Operands(NamedTuple):
  """What an iteration's gradient is computed from: operands of each root, factors of the tail (`programs/roots.py`)."""

  of_roots: Sequence[Sequence[jax.Array]]
  factors: Sequence[jax.Array]


class Accumulated(NamedTuple):
  """The arrays of a weight that an iteration's gradient changes; None for one that it does not."""

  total: Accumulator
  buffers: Buffers | None = None
  finished: Accumulator | None = None


class Item(NamedTuple):
  """The items that the stages are at in an iteration of backward."""

  repeat: Numbers  # the repeat
  works: Mask  # whether the stage is not idle. Gradients of idle stages may have any value, NaN included.
  first: Mask  # whether it adds the first gradient of a repeat: in backward, that of its last item
  # whether it adds the last gradient of a repeat, and another repeat follows; None if no stage does
  finishes: Mask | None


def add_to(total: Accumulator, g: Accumulator, item: Item) -> Accumulator:
  """A sum with one more gradient."""
  of_stages = lambda mask: mask.reshape((1, -1) + (1,) * (g.ndim - 2))
  return _sum(total, g, of_stages(item.first), of_stages(item.works))


def add_and_finish(
    mesh: Mesh,
    by_device: Layout,
    place: Layout,
    part: Any,
    total: Accumulator,
    waiting: jax.Array,
    operands: Sequence[jax.Array],
    item: Item,
) -> list[jax.Array]:
  """[the sum with one more gradient, finished sums]. The last one of a repeat is added where the sum waits.

  `total` is laid out as `by_device`, and `waiting` as `place`: finished sums, [F, S, …], or the weight's buffers, where
  they wait in the current one. A device computes its `part` of the gradient (`programs.parts_on_device.OnDevice`) from
  the operands. `item.finishes` is not None.
  """
  in_buffers = place.stages > by_device.stages

  def add(repeat, works, first, finishes, total, waiting, *operands):
    def last(total, waiting, operands):
      finished = total + part.on_device(*operands).astype(total.dtype)
      return total, put_finished(finished, waiting, repeat, in_buffers)

    def other(total, waiting, operands):
      return _sum(total, part.on_device(*operands), first, works), waiting

    return jax.lax.cond(finishes, last, other, total, waiting, operands)

  places = [by_device, place]
  indices: list[Any] = [item.repeat, item.works, item.first, item.finishes]
  args, layouts = [total, waiting, *operands], [*places, *part.layouts(by_device)]
  return OnDevices.per_stage(add, mesh, indices, args, layouts, places).run(mesh)


def put_finished(total: jax.Array, waiting: jax.Array, repeat: jax.Array, in_buffers: bool) -> jax.Array:
  """Puts a finished sum of one stage, [F, …], where it waits: in the current buffer, or beside the buffers.

  `waiting` has the buffers, [B, F, …], if `in_buffers`, or else the place beside them, [F, …].
  """
  total = total.astype(waiting.dtype)
  return jax.lax.dynamic_update_index_in_dim(waiting, total, repeat % 2, 0) if in_buffers else total


def _sum(total: jax.Array, g: jax.Array, first: jax.Array, works: jax.Array) -> jax.Array:
  """A sum with one more gradient. It begins anew with the first; a gradient of an idle stage does not count."""
  acc = jnp.where(first, jnp.zeros_like(total), total)
  return acc + jnp.where(works, g, jnp.zeros_like(g)).astype(acc.dtype)

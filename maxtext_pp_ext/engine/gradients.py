# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Sums of the weights' gradients: over the microbatches of a repeat, then over the devices, then in the stored layout.

An iteration may leave a gradient as a partial sum (see `programs/partial.py`). Each device adds such gradients up over
the M items of a repeat. When a stage has finished a repeat, its sum is cast to the compute dtype and reduced, one piece
per iteration, while the stage works on the repeat before. Each of these iterations also gathers one piece of the weight
into the window's prefetch buffer, which has the same shape as the sum. So the sum waits in that buffer, and each piece of
the weight takes the place of the piece of the sum that has just left. A complete gradient is added to its place in the
stored layout at once.

The buffer in which a sum will wait is the stage's slot until then. So the last of its M summands is computed when nothing
reads the weight any more, and the matrix product that computes it adds, casts and writes there. Stages do so in different
iterations, and all wait for the slowest: apart from the product, casting would make every second iteration longer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from maxtext_pp_ext.engine.per_stage import Layout, per_stage
from maxtext_pp_ext.engine.programs.partial import Summand
from maxtext_pp_ext.engine.programs.parts_on_device import OnDevice
from maxtext_pp_ext.engine.sums import add_and_finish, add_to, Added, Item, put_finished, Sums
from maxtext_pp_ext.engine.transfers.memory_order import in_memory
from maxtext_pp_ext.engine.transfers.transfer import Transfer
from maxtext_pp_ext.engine.weight_layout import WeightLayout
from maxtext_pp_ext.engine.weights import Arrays, other_buffer, Weights, Window
from maxtext_pp_ext.sharding import constrain


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gradients:
  """Adds up the gradients of parameters.

  Indices such as `repeat` are arrays [S]: each stage has its own.

  Attributes:
    mesh: the device mesh.
    layouts: one per parameter.
    params: the parameters' shapes and dtypes, [R, S, …].
    in_window: for each parameter, whether its finished sums wait in the window's prefetch buffer.
    pieces: the number of pieces in which a repeat's sums are reduced.
    orders: for each parameter, the dimensions [S, …] of its gradient from major to minor in memory.
    parts_on_device: for each parameter how a device computes its part of the gradient, or None.
  """

  mesh: Mesh
  layouts: list[WeightLayout]
  params: list[jax.ShapeDtypeStruct]
  in_window: list[bool]
  pieces: int
  orders: list[tuple[int, ...]]
  parts_on_device: list[OnDevice | None]

  @classmethod
  def of(
      cls,
      weights: Weights,
      params: Arrays,
      parts: Sequence[int],
      orders: Sequence[Sequence[int]],
      parts_on_device: Sequence[OnDevice | None],
  ):
    """For gradients of `weights`.

    Args:
      weights: the weights.
      params: the parameters, [R, S, …].
      parts: for each gradient the number of parts in which it is left; a gradient with 1 part is complete.
      orders: for each weight, its dimensions [S, …] from major to minor, as products read it.
      parts_on_device: for each gradient how a device computes its part of it, or None.
    """
    layouts = [
        each if n > 1 else dataclasses.replace(each, partial_axes=())
        for each, n in zip(weights.layouts, parts, strict=True)
    ]
    types = [jax.ShapeDtypeStruct(w.shape, w.dtype) for w in params]
    # If pieces overlap, an arriving piece of the weight would overwrite a part of the sum that has not been reduced yet.
    in_window = [
        not weights.replaces
        and weights.has_window(each, w.dtype)
        and each.transfer(weights.mesh, w.shape, weights.pieces).moves_once
        for each, w in zip(layouts, types, strict=True)
    ]
    return cls(
        mesh=weights.mesh,
        layouts=layouts,
        params=types,
        in_window=in_window,
        pieces=weights.pieces,
        orders=[
            _written(order, each) if weights.replaces else tuple(order)
            for order, each in zip(orders, layouts, strict=True)
        ],
        parts_on_device=list(parts_on_device),
    )

  @property
  def _partial(self) -> list[int]:
    return [i for i, each in enumerate(self.layouts) if each.partial_axes]

  @property
  def any_partial(self) -> bool:
    return bool(self._partial)

  @property
  def reduced_beside_nothing(self) -> list[int]:
    """The numbers of the gradients during whose reductions the devices compute nothing."""
    transfers = zip(self._partial, self._transfers(self.pieces), strict=True)
    return [i for i, transfer in transfers if not transfer.is_asynchronous]

  @property
  def _is_sum(self) -> bool:
    """Whether an iteration's gradient is the sum of a repeat: it waits for its reduction where it is."""
    return self.pieces == 1

  def zeros(self) -> Sums:
    """The sums before the first item."""
    total = [self._zeros(i, self.layouts[i].accumulation_dtype) for i in self._partial]
    elsewhere = lambda i: self.in_window[i] or self._repeats == 1 or self._is_sum
    done = [None if elsewhere(i) else self._zeros(i, self.layouts[i].compute_dtype) for i in self._partial]
    stored = [self._empty(*each) for each in zip(self.layouts, self.params, strict=True)]
    return Sums(total, done, stored)

  @property
  def _repeats(self) -> int:
    return self.params[0].shape[0]

  def _zeros(self, i: int, dtype: jnp.dtype) -> jax.Array:
    return self.layouts[i].by_device_like(self.mesh, self.params[i].shape[1:], dtype)

  def _empty(self, layout: WeightLayout, param: jax.ShapeDtypeStruct) -> jax.Array:
    dtype = layout.compute_dtype if layout.partial_axes else layout.accumulation_dtype  # that of what is added
    if layout.partial_axes:
      return constrain(jax.lax.empty(param.shape, dtype), P(None, *layout.sharded), self.mesh)
    return constrain(jnp.full(param.shape, layout.combine.nothing, dtype), P(None, *layout.sharded), self.mesh)

  def adder(self, sums: Sums, window: Window, item: Item) -> Callable[[int, Summand], Added]:
    """(number, summand of an iteration) -> the sum of the repeat so far; for gradients that are partial sums.

    Args:
      sums: the sums so far.
      window: the window, leaves [B, F, S, …] or None.
      item: the items that the stages are at.
    """
    totals = dict(zip(self._partial, sums.total, strict=True))
    waiting = {} if item.finishes is None else dict(zip(self._partial, self._done(sums, window), strict=True))

    def add(number: int, summand: Summand) -> Added:
      total = totals[number]
      if item.finishes is not None and self._finishes_where_it_waits(number):
        layout, place = self.layouts[number], self._place(number)
        part = cast(OnDevice, self.parts_on_device[number])
        return add_and_finish(self.mesh, layout, place, part, total, waiting[number], summand, item)
      g = constrain(summand.compute(), self.layouts[number].by_device.spec, self.mesh)
      if self._is_sum:
        return Added(in_memory(g.astype(total.dtype), [0, *(1 + dim for dim in self.orders[number])]))
      return Added(add_to(total, g, item))

    return add

  def _finishes_where_it_waits(self, i: int) -> bool:
    """Whether the product that computes a gradient also writes the finished sum to where it waits.

    A vector is not worth a branch. The compiler adds and casts it in no time.
    """
    return self.parts_on_device[i] is not None and not self._is_sum and len(self.params[i].shape) > 3

  @jax.named_scope("reduce")
  def add(self, sums: Sums, window: Window, gradients: Sequence[Any], item: Item) -> tuple[Sums, Window]:
    """Adds an iteration's gradients.

    Args:
      sums: the sums so far.
      window: the window, leaves [B, F, S, …] or None.
      gradients: of those that are partial sums the results of `adder`; of the others the gradients, [1, S, …], in any
        float dtype.
      item: the items that the stages are at.

    Returns:
      (sums, the window with sums that are finished).
    """
    stored, done, window = list(sums.stored), list(sums.done), list(window)
    complete = [
        (i, constrain(gradients[i][0], layout.sharded, self.mesh))
        for i, layout in enumerate(self.layouts)
        if not layout.partial_axes
    ]
    for (i, _), new in zip(complete, self._add_complete(sums, complete, item.repeat, item.works), strict=True):
      stored[i] = new
    added: list[Added] = [gradients[i] for i in self._partial]
    for k, (i, each) in enumerate(zip(self._partial, added, strict=True)):
      if each.waiting is not None and self.in_window[i]:
        window[i] = each.waiting
      elif each.waiting is not None:
        done[k] = each.waiting
    return Sums([each.total for each in added], done, stored), window

  def _add_complete(self, sums: Sums, gradients, repeat: jax.Array, where: jax.Array) -> Arrays:
    if not gradients:
      return []

    def add(repeat, where, *arrays):
      def one(combine, all_, g):
        old = jax.lax.dynamic_index_in_dim(all_, repeat, keepdims=False)
        g = jnp.where(where, g.astype(old.dtype), jnp.full_like(old, combine.nothing))
        return jax.lax.dynamic_update_index_in_dim(all_, combine.add(old, g), repeat, 0)

      half = len(arrays) // 2
      return [one(*each) for each in zip(combines, arrays[:half], arrays[half:], strict=True)]

    combines = [self.layouts[i].combine for i, _ in gradients]
    stored = [Layout(P(None, *self.layouts[i].sharded), 1) for i, _ in gradients]
    shards = [Layout(self.layouts[i].sharded, 0) for i, _ in gradients]
    args = [*(sums.stored[i] for i, _ in gradients), *(g for _, g in gradients)]
    return per_stage(add, self.mesh, [repeat, where], args, [*stored, *shards], stored)

  @jax.named_scope("repeat")
  def finish_repeat(self, sums: Sums, window: Window, repeat: jax.Array, where: jax.Array) -> tuple[Sums, Window]:
    """Moves the totals of stages that have finished a repeat to where they wait for reduction, if they are not there.

    That is the buffer of the window that has been the stage's slot: with the next repeat it is the prefetch buffer.

    Args:
      sums: the sums so far.
      window: the window, leaves [B, F, S, …] or None.
      repeat: the repeat that each stage is at, int [S].
      where: the stages that have finished it, bool [S].

    Returns:
      (sums, window).
    """
    own = [(k, i) for k, i in enumerate(self._partial) if not self._finishes_where_it_waits(i)]
    if not own or self._is_sum:
      return sums, window

    def move(where, repeat, *arrays):
      half = len(arrays) // 2

      put = lambda i, total, waiting: put_finished(total, waiting, repeat, self.in_window[i])
      # A `cond` instead of a `where` copies the sums once per repeat and not at every iteration.
      take = lambda total, done: [put(i, *one) for (_, i), one in zip(own, zip(total, done, strict=True), strict=True)]
      return jax.lax.cond(where, take, lambda total, done: done, list(arrays[:half]), list(arrays[half:]))

    totals = [self.layouts[i].by_device for _, i in own]
    waiting = [self._place(i) for _, i in own]
    waits = self._done(sums, window)
    arrays = [*(sums.total[k] for k, _ in own), *(waits[k] for k, _ in own)]
    moved = per_stage(move, self.mesh, [where, repeat], arrays, [*totals, *waiting], waiting)
    done, window = list(sums.done), list(window)
    for (k, i), new in zip(own, moved, strict=True):
      if self.in_window[i]:
        window[i] = new
      else:
        done[k] = new
    return sums._replace(done=done), window

  def reduce(
      self, sums: Sums, window: Window, repeat: jax.Array, finished: jax.Array, piece: jax.Array
  ) -> tuple[Sums, Window]:
    """Reduces one piece of the finished sums into their repeat's place.

    Args:
      sums: the sums so far.
      window: the window, leaves [B, F, S, …] or None.
      repeat: the repeat that each stage is at, int [S].
      finished: the repeat that each stage has finished last, int [S].
      piece: number of the piece, int [S], 0 … pieces − 1.

    Returns:
      (sums, the window, for what comes after the piece has been read).
    """
    if not self._partial:
      return sums, window
    transfers = self._transfers(self.pieces)
    in_window = [self.in_window[i] for i in self._partial]
    orders = [[dim - 1 for dim in self.orders[i] if dim] for i in self._partial]

    def cut_out(repeat, piece, *done):
      cut = []
      for i, transfer, x, inside, order in zip(self._partial, transfers, done, in_window, orders, strict=True):
        all_, number = (x, other_buffer(repeat)) if inside else (x[None], 0)
        cut.append(transfer.cut_out(all_, number, piece, order).astype(self.layouts[i].compute_dtype))
      return cut

    waiting = [self._place(i) for i in self._partial]
    leaving = per_stage(cut_out, self.mesh, [repeat, piece], self._done(sums, window), waiting, self._pieces(transfers))
    window = list(window)
    if self._is_sum and any(transfer.is_asynchronous for transfer in transfers):
      # All are ready together, and the window waits for them. Without this barrier reductions take turns with gathers:
      # 1.10 s instead of 1.08 for a window of Llama 3 8B on v6e (`python -m benchmarks.overlap`).
      window, leaving = jax.lax.optimization_barrier((window, leaving))
    else:  # One by one: the pieces of layers whose backward comes late need no memory before.
      for k, i in enumerate(self._partial):
        if self.in_window[i]:
          window[i], leaving[k] = jax.lax.optimization_barrier((window[i], leaving[k]))
    return self._reduce(sums, leaving, transfers, finished, piece), window

  def _place(self, i: int) -> Layout:
    """The layout of where the finished sums of a weight wait."""
    return self.layouts[i].window if self.in_window[i] else self.layouts[i].by_device

  def _done(self, sums: Sums, window: Window) -> Arrays:
    if self._is_sum:
      return sums.total
    done = [window[i] if self.in_window[i] else own for i, own in zip(self._partial, sums.done, strict=True)]
    return cast(Arrays, done)  # with several repeats each sum is in one of the two; with one repeat, this is not called

  def finish(self, sums: Sums) -> Arrays:
    """The gradients [R, S, …] in the parameters' dtypes, when `total` holds repeat 0 and no other sum is left."""
    zeros = jnp.zeros((self.params[0].shape[1],), jnp.int32)
    summands = [t.astype(self.layouts[i].compute_dtype) for i, t in zip(self._partial, sums.total, strict=True)]
    transfers = self._transfers(pieces=1)
    whole = lambda piece, *own: [t.cut_out(x[None], 0, piece) for t, x in zip(transfers, own, strict=True)]
    layouts = [self.layouts[i].by_device for i in self._partial]
    pieces = per_stage(whole, self.mesh, [zeros], summands, layouts, self._pieces(transfers)) if summands else []
    stored = self._reduce(sums, pieces, transfers, zeros, zeros).stored
    return [g.astype(w.dtype) for g, w in zip(stored, self.params, strict=True)]

  def _transfers(self, pieces: int) -> list[Transfer]:
    return [self.layouts[i].transfer(self.mesh, self.params[i].shape, pieces) for i in self._partial]

  def _pieces(self, transfers: list[Transfer]) -> list[Layout]:
    return [self.layouts[i].piece(transfer) for i, transfer in zip(self._partial, transfers, strict=True)]

  @jax.named_scope("reduce")
  def _reduce(
      self, sums: Sums, leaving: Arrays, transfers: list[Transfer], finished: jax.Array, piece: jax.Array
  ) -> Sums:
    if not self._partial:
      return sums
    layouts = [self.layouts[i] for i in self._partial]
    orders = [[dim - 1 for dim in self.orders[i] if dim] if self._is_sum else None for i in self._partial]

    def reduce(finished, piece, *arrays):
      half = len(arrays) // 2
      each = zip(transfers, layouts, arrays[:half], arrays[half:], orders, strict=True)
      return [
          t.reduce(part[0], layout.partial_axes, all_, finished, piece, order) for t, layout, part, all_, order in each
      ]

    places = [Layout(P(None, *layout.sharded), 1) for layout in layouts]
    args = [*leaving, *(sums.stored[i] for i in self._partial)]
    reduced = per_stage(reduce, self.mesh, [finished, piece], args, [*self._pieces(transfers), *places], places)
    stored = list(sums.stored)
    for i, new in zip(self._partial, reduced, strict=True):
      stored[i] = new
    return sums._replace(stored=stored)


def _written(order: Sequence[int], layout: WeightLayout) -> tuple[int, ...]:
  """The order of a gradient's dimensions [S, …]: as products read the weight, but the last one is not scattered.

  Parts of the last one would be narrower than a tile. A product writes this order, too; any other would be a copy.
  """
  if len(order) < 3 or not layout.gathered_axes[order[-1] - 1]:
    return tuple(order)
  return (*order[:-2], order[-1], order[-2])

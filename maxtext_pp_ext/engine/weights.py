# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The weights that stages compute with. A residency determines when they are gathered, kept and replaced.

With the residency `repeat`, each stage has a window of two buffers that slides over its repeats. The stage computes with
one of them, its slot, while its next repeat is prefetched into the other, one piece per iteration. When that repeat
begins, the two buffers change places. No weight is copied. No stage waits for a
gather, and no stage holds a third repeat.
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
from maxtext_pp_ext.engine.programs.one_of import OneOf
from maxtext_pp_ext.engine.transfers.memory_order import in_memory
from maxtext_pp_ext.engine.transfers.transfer import Transfer
from maxtext_pp_ext.engine.weight_layout import WeightLayout
from maxtext_pp_ext.schedule import Residency
from maxtext_pp_ext.sharding import constrain

Arrays = list[jax.Array]
# One entry per weight, None for weights without a window.
Windowed = list[jax.Array | None]
# Gathered weights, leaves [B, F, S, …], each of the B buffers in the layout `by_device`. B is 2, or 1 if there is one
# repeat only, or one piece. A stage at repeat r computes with buffer r mod B, its slot; the other one is its prefetch
# buffer. The F parts of a weight are equal once all its pieces have arrived. Before, they may hold any values: in
# backward, summands of a gradient wait there for their reduction (see `Gradients`).
Window = Windowed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weights:
  """The weights of the repeat that each stage is at, for any residency.

  Indices such as `repeat` are arrays [S]: each stage has its own.

  Attributes:
    residency: how long gathered weights are kept.
    mesh: the device mesh.
    layouts: one per parameter.
    pieces: the number of pieces in which a repeat's weights are gathered.
    orders: for each weight, its dimensions [S, …] from major to minor in memory, as the products of the traced stages
      read them; () for row-major.
    of_kernels: for each weight whether kernels read it, and nothing else does; () for none.
  """

  residency: Residency
  mesh: Mesh
  layouts: list[WeightLayout]
  pieces: int
  orders: Sequence[Sequence[int]] = ()
  of_kernels: Sequence[bool] = ()

  @property
  def advances(self) -> bool:
    """Whether a stage that begins a repeat replaces the weights that it keeps."""
    return self.residency.prefetches

  @property
  def replaces(self) -> bool:
    """Whether a repeat arrives in one piece, which replaces the repeat before instead of being put beside it."""
    return self.pieces == 1

  def in_steps(self, params: Arrays) -> bool:
    """Whether a repeat arrives in one piece, some weight of it in several steps.

    Args:
      params: leaves [R, S, …].
    """
    windowed = [i for i, (each, w) in enumerate(self._with_layouts(params)) if self.has_window(each, w.dtype)]
    return self.replaces and any(transfer.in_steps for transfer in self._transfers(windowed, params))

  def gathered_beside_compute(self, loaded: Arrays) -> list[int]:
    """The numbers of the weights with a window that are gathered beside compute.

    Args:
      loaded: the result of `load`, leaves [R, S, …].
    """
    windowed = [i for i, (each, w) in enumerate(self._with_layouts(loaded)) if self.has_window(each, w.dtype)]
    return [
        i for i, transfer in zip(windowed, self._transfers(windowed, loaded), strict=True) if transfer.is_asynchronous
    ]

  def has_window(self, layout: WeightLayout, stored: jnp.dtype) -> bool:
    """Whether a weight is gathered, or cast from the dtype in which it is stored, into a window."""
    return self.residency.prefetches and (layout.needs_gather or layout.compute_dtype != stored)

  @jax.named_scope("gather")
  def load(self, params: Arrays) -> Arrays:
    """The weights that windows are filled from, leaves [R, S, …]. Gathers them if they stay gathered for the whole step.

    Args:
      params: leaves [R, S, …], in the dtypes in which they are stored.

    Returns:
      The parameters, either sharded as they are stored and in the same dtypes, or gathered and in the compute dtypes.
    """
    if not self.residency.gathers_first:
      return [constrain(w, P(None, *each.sharded), self.mesh) for each, w in self._with_layouts(params)]
    return [
        constrain(w.astype(each.compute_dtype), P(None, *each.gathered), self.mesh)
        for each, w in self._with_layouts(params)
    ]

  def keep(self, params: Arrays, loaded: Arrays) -> Arrays:
    """The weights that backward fills windows from, leaves [R, S, …].

    These are the gathered weights if they stay gathered for the whole step, and otherwise the parameters. Where `load`
    changes the order of shards, backward changes it again, so that no copy is held in between.
    """
    return loaded if self.residency.gathers_first else params

  @jax.named_scope("gather")
  def first(self, loaded: Arrays) -> Windowed:
    """The weights of repeat 0 on all stages, leaves [S, …] from leaves [R, S, …], in the compute dtypes."""

    def gathered(layout: WeightLayout, w: jax.Array) -> jax.Array:
      shard = constrain(w[0], layout.sharded, self.mesh)
      return constrain(shard.astype(layout.compute_dtype), layout.gathered, self.mesh)

    return [gathered(each, w) if self.has_window(each, w.dtype) else None for each, w in self._with_layouts(loaded)]

  def has_prefetch_buffers(self, repeats: int) -> bool:
    """Whether the windows of R repeats have prefetch buffers beside their slots."""
    return self.residency.prefetches and repeats > 1 and not self.replaces

  def window(self, slot: Windowed, repeat: int, repeats: int) -> Window:
    """A window with these weights in the slots, and empty prefetch buffers.

    Args:
      slot: the weights of one repeat on all stages, leaves [S, …].
      repeat: the number of the repeat.
      repeats: R.
    """

    def buffers(layout: WeightLayout, w: jax.Array) -> jax.Array:
      by_device = jnp.broadcast_to(w, (layout.parts(self.mesh), *w.shape))
      both = [by_device, jnp.zeros_like(by_device)] if self.has_prefetch_buffers(repeats) else [by_device]
      return constrain(jnp.stack(both[:: -1 if repeat % 2 else 1]), layout.window.spec, self.mesh)

    return [None if w is None else buffers(each, w) for each, w in self._with_layouts(slot)]

  def slot(self, window: Window, repeat: jax.Array) -> Windowed:
    """The weights of each stage's slot, leaves [S, …].

    Args:
      window: the window.
      repeat: the repeat that each stage is at, int [S].
    """
    windowed = _windowed(window)

    def own(repeat, *buffers):
      slots = [w[0] for w in _take(repeat % buffers[0].shape[0], buffers)]
      if self.replaces:  # the compiler lays out each repeat anew
        return slots
      # Left to itself, the compiler (libtpu 0.0.48.1) may choose another order for a product, and convert at each use.
      return [self._in_order(i, w) for i, w in zip(windowed, slots, strict=True)]

    results = [Layout(self.layouts[i].gathered, 0) for i in windowed]
    return self._run(own, windowed, [repeat], [(window, lambda i: self.layouts[i].window)], results)

  def ordered(self, window: Window) -> Window:
    """The window with the dimensions of the weights in their order in memory."""
    if self.replaces or not self.orders:
      return window
    return [
        None if w is None else in_memory(w, [0, 1, *(2 + dim for dim in order)])
        for w, order in zip(window, self.orders, strict=True)
    ]

  def at(self, window: Window, loaded: Arrays, repeat: jax.Array) -> list[Any]:
    """The gathered weights of an iteration, leaves [S, …], in the compute dtypes; `OneOf`s of those that kernels read.

    Args:
      window: the window.
      loaded: the result of `load` or `keep`, leaves [R, S, …]; weights without a window are taken from it.
      repeat: the repeat that each stage is at, int [S].
    """
    of_kernels = {i: w for i, w in enumerate(window) if w is not None and w.shape[0] > 1 and self._is_of_kernels(i)}
    others = [None if i in of_kernels else w for i, w in enumerate(window)]
    stored = [i for i, w in enumerate(window) if w is None]
    results = [Layout(self._loaded_spec(i), 0) for i in stored]
    own = self._run(lambda repeat, *w: _take(repeat, w), stored, [repeat], [(loaded, self._loaded)], results)
    for i in stored:
      own[i] = constrain(own[i].astype(self.layouts[i].compute_dtype), self._loaded_spec(i), self.mesh)
    weights = [w if w is not None else own[i] for i, w in enumerate(self.slot(others, repeat))]
    # Constrained at each use, so that a loop carries them in this layout and not in one of the compiler's choice.
    with jax.named_scope("gather"):  # of the weights without a window
      at = [w if w is None else constrain(w, each.gathered, self.mesh) for each, w in self._with_layouts(weights)]
    return [self._one_of(i, of_kernels[i], repeat) if i in of_kernels else w for i, w in enumerate(at)]

  def _is_of_kernels(self, i: int) -> bool:
    return bool(self.of_kernels) and self.of_kernels[i]

  def _one_of(self, i: int, buffers: jax.Array, repeat: jax.Array) -> OneOf:
    """A weight's buffers [B, S, …], of which each stage computes with one."""
    layout = self.layouts[i]
    both = Layout(P(None, *layout.gathered), 1)
    (arrays,) = per_stage(lambda w: [w[:, 0]], self.mesh, [], [buffers], [layout.window], [both])
    return OneOf(constrain(arrays, both.spec, self.mesh), repeat % buffers.shape[0])

  @jax.named_scope("gather")
  def prefetch(self, window: Window, loaded: Arrays, repeat: jax.Array, piece: jax.Array) -> Windowed:
    """Gathers one piece of a repeat's weights, leaves [F, S, …].

    Args:
      window: the window that the piece is for.
      loaded: the result of `load` or `keep`, leaves [R, S, …].
      repeat: the repeat that each stage works on next, int [S].
      piece: number of the piece, int [S], 0 … pieces − 1.
    """
    windowed = _windowed(window)
    transfers = self._transfers(windowed, loaded)

    def gather(repeat, piece, *stored):
      each = zip(windowed, transfers, stored, strict=True)
      return [t.gather(w, repeat, piece, self.layouts[i].compute_dtype)[None] for i, t, w in each]

    results = [self.layouts[i].piece(t) for i, t in zip(windowed, transfers, strict=True)]
    return self._run(gather, windowed, [repeat, piece], [(loaded, self._loaded)], results)

  @jax.named_scope("repeat")
  def place(
      self,
      window: Window,
      pieces: Windowed,
      loaded: Arrays,
      repeat: jax.Array,
      piece: jax.Array,
  ) -> Window:
    """Puts one piece of another repeat's weights into each stage's prefetch buffer.

    All else that reads the window in an iteration has to come before. Otherwise the compiler copies the window. With
    one piece the repeat takes the place of the one in the slot.

    Args:
      window: the window so far.
      pieces: the result of `prefetch`, or None for weights whose pieces are in the window already.
      loaded: the arrays that the pieces were gathered from.
      repeat: the repeat that each stage is at, int [S].
      piece: number of the piece, int [S], 0 … pieces − 1.
    """
    windowed = _windowed(pieces)
    transfers = self._transfers(windowed, loaded)
    layouts = [self.layouts[i].window for i in windowed]
    pieces_of = {i: self.layouts[i].piece(t) for i, t in zip(windowed, transfers, strict=True)}
    if self.replaces:

      def whole(*parts):
        # A repeat that is gathered in steps is put in its order before the last one. A gather at once is along the major
        # dimension: another order would be a copy of the whole.
        each = zip(windowed, transfers, (part[0] for part in parts), strict=True)
        return [(self._in_order(i, w) if self.orders and t.in_steps else w)[None, None] for i, t, w in each]

      placed = self._run(whole, windowed, [], [(pieces, pieces_of.__getitem__)], layouts)
      return [old if new is None else new for old, new in zip(window, placed, strict=True)]

    def put(repeat, piece, *arrays):
      half = len(arrays) // 2
      each = zip(transfers, arrays[:half], arrays[half:], strict=True)
      return [t.place(part[0], buffers, other_buffer(repeat), piece) for t, buffers, part in each]

    args: list[Any] = [(window, lambda i: self.layouts[i].window), (pieces, pieces_of.__getitem__)]
    placed = self._run(put, windowed, [repeat, piece], args, layouts)
    return [old if new is None else new for old, new in zip(window, placed, strict=True)]

  def place_one(
      self, number: int, arrived: jax.Array, buffers: jax.Array, loaded: Arrays, repeat: jax.Array, piece: jax.Array
  ) -> jax.Array:
    """The window of one weight, [B, F, S, …], with a piece of another repeat; see `place`."""
    of_it = lambda x: [x if i == number else None for i in range(len(self.layouts))]
    placed = self.place(of_it(buffers), of_it(arrived), loaded, repeat, piece)[number]
    return cast(jax.Array, placed)

  def _run(
      self,
      fn: Callable[..., Sequence[jax.Array]],
      chosen: list[int],
      indices: list[jax.Array],
      args: Sequence[tuple[Sequence[Any], Callable[[int], Any]]],
      results: list[Any],
  ) -> list[Any]:
    """Runs `per_stage` on the chosen weights' entries of each list in `args`; None for the other weights."""
    out: list[Any] = [None] * len(self.layouts)
    if chosen:
      arrays = [all_[i] for all_, _ in args for i in chosen]
      layouts = [layout(i) for _, layout in args for i in chosen]
      for i, x in zip(chosen, per_stage(fn, self.mesh, indices, arrays, layouts, results), strict=True):
        out[i] = x
    return out

  def _in_order(self, i: int, weight: jax.Array) -> jax.Array:
    """A stage's weight, […], with its dimensions in their order in memory."""
    return in_memory(weight, [dim - 1 for dim in self.orders[i] if dim] if self.orders else range(weight.ndim))

  def _transfers(self, chosen: list[int], loaded: Arrays) -> list[Transfer]:
    return [self.layouts[i].transfer(self.mesh, loaded[i].shape, self.pieces) for i in chosen]

  def _with_layouts(self, arrays):
    return zip(self.layouts, arrays, strict=True)

  def _loaded_spec(self, i: int) -> P:
    """The PartitionSpec of one repeat of weight i, [S, …], as `load` returns it."""
    return self.layouts[i].gathered if self.residency.gathers_first else self.layouts[i].sharded

  def _loaded(self, i: int) -> Layout:
    return Layout(P(None, *self._loaded_spec(i)), 1)


def other_buffer(repeat: jax.Array) -> jax.Array:
  """The number of the prefetch buffer of a stage that is at a repeat; the buffer of the repeats before and after it."""
  return (repeat + 1) % 2


def _windowed(window: Window) -> list[int]:
  return [i for i, w in enumerate(window) if w is not None]


def _take(index: jax.Array | int, arrays: Sequence[jax.Array]) -> Arrays:
  return [jax.lax.dynamic_index_in_dim(w, index, keepdims=False) for w in arrays]

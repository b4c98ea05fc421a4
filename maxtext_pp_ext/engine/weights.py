# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The weights that stages compute with. A residency determines when they are gathered, kept and replaced.

With the residency `repeat`, each stage has a window of two buffers that slides over its repeats. The stage computes with
`slot` while its next repeat is prefetched into `buffer`, one piece per iteration. When that repeat begins, the buffer
becomes the slot. No stage waits for a gather, and no stage holds a third repeat.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from maxtext_pp_ext.engine.per_stage import Layout, per_stage
from maxtext_pp_ext.engine.weight_layout import WeightLayout
from maxtext_pp_ext.schedule import Residency
from maxtext_pp_ext.sharding import constrain

Arrays = list[jax.Array]
Buffer = list[jax.Array | None]


class Window(NamedTuple):
  """Gathered weights.

  Attributes:
    slot: the weights that the stages compute with, leaves [S, …], in their compute dtypes.
    buffer: the prefetch buffer, which becomes the slot next, leaves [F, S, …] in the layout `by_device`; None for weights
      that need not be gathered. The F parts of a weight are equal once all its pieces have arrived. Before, they may hold
      any values: in backward, summands of a gradient wait there for their reduction (see `Gradients`).
  """

  slot: Arrays
  buffer: Buffer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weights:
  """The weights of the repeat that each stage is at, for any residency.

  Indices such as `repeat` are arrays [S]: each stage has its own.

  Attributes:
    residency: how long gathered weights are kept.
    mesh: the device mesh.
    layouts: one per parameter.
    pieces: the number of pieces in which a repeat's weights are gathered.
  """

  residency: Residency
  mesh: Mesh
  layouts: list[WeightLayout]
  pieces: int

  @property
  def has_slots(self) -> bool:
    """Whether gathered weights are kept from one iteration to the next."""
    return self.residency.has_slots

  def load(self, params: Arrays) -> Arrays:
    """The weights that slots are filled from, leaves [R, S, …]. Gathers them if they stay gathered for the whole step.

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
    """The weights that backward fills slots from, leaves [R, S, …].

    These are the gathered weights if they stay gathered for the whole step, and otherwise the parameters. Where `load`
    changes the order of shards, backward changes it again, so that no copy is held in between.
    """
    return loaded if self.residency.gathers_first else params

  def first(self, loaded: Arrays) -> Arrays:
    """The slot of repeat 0 on all stages, leaves [S, …] from leaves [R, S, …]; empty without slots."""
    if not self.has_slots:
      return []
    stored = [constrain(w[0], each.spec, self.mesh) for each, w in zip(self._loaded(0), loaded, strict=True)]
    return [constrain(w.astype(each.compute_dtype), each.gathered, self.mesh) for each, w in self._with_layouts(stored)]

  def window(self, slot: Arrays) -> Window:
    """A window with this slot, leaves [S, …], and an empty prefetch buffer."""
    if not self.has_slots:
      return Window([], [None] * len(self.layouts))
    empty = lambda layout, w: layout.by_device_like(self.mesh, w.shape, w.dtype) if self.is_prefetched(layout) else None
    return Window(slot, [empty(each, w) for each, w in self._with_layouts(slot)])

  def at(self, slot: Arrays, loaded: Arrays, repeat: jax.Array) -> Arrays:
    """The gathered weights of an iteration, leaves [S, …], in the compute dtypes.

    Args:
      slot: leaves [S, …]; empty without slots.
      loaded: the result of `load` or `keep`, leaves [R, S, …].
      repeat: the repeat that each stage is at, int [S].
    """
    if self.has_slots:
      # Constrained at each use, so that a loop carries them in this layout and not in one of the compiler's choice.
      return [constrain(w, each.gathered, self.mesh) for each, w in self._with_layouts(slot)]
    own = lambda repeat, *stored: [jax.lax.dynamic_index_in_dim(w, repeat, keepdims=False) for w in stored]
    results = [Layout(each.sharded, 0) for each in self.layouts]
    shards = per_stage(own, self.mesh, [repeat], loaded, self._loaded(1), results)
    shards = [constrain(w.astype(each.compute_dtype), each.sharded, self.mesh) for each, w in self._with_layouts(shards)]
    return [constrain(w, each.gathered, self.mesh) for each, w in self._with_layouts(shards)]

  def prefetch(self, window: Window, loaded: Arrays, repeat: jax.Array, piece: jax.Array) -> Window:
    """Gathers one piece of a repeat into the prefetch buffer.

    Args:
      window: the window so far.
      loaded: the result of `load` or `keep`, leaves [R, S, …].
      repeat: the repeat that each stage works on next, int [S].
      piece: number of the piece, int [S], 0 … pieces − 1.
    """
    prefetched = [i for i, w in enumerate(window.buffer) if w is not None]
    if not prefetched:
      return window
    transfers = [self.layouts[i].transfer(self.mesh, loaded[i].shape, self.pieces) for i in prefetched]

    def gather(repeat, piece, *arrays):
      stored, buffer = arrays[: len(prefetched)], arrays[len(prefetched) :]
      return [t.gather(w, repeat, new[0], piece)[None] for t, w, new in zip(transfers, stored, buffer, strict=True)]

    stored = [Layout(P(None, *self.layouts[i].sharded), 1) for i in prefetched]
    gathered = [self.layouts[i].by_device for i in prefetched]
    args = [*(loaded[i] for i in prefetched), *(w for w in window.buffer if w is not None)]
    filled = per_stage(gather, self.mesh, [repeat, piece], args, [*stored, *gathered], gathered)
    buffer = list(window.buffer)
    for i, w in zip(prefetched, filled, strict=True):
      buffer[i] = w
    return window._replace(buffer=buffer)

  def advance(self, window: Window, loaded: Arrays, repeat: jax.Array, where: jax.Array) -> Window:
    """Replaces the slot by the prefetch buffer, which holds the weights of the next repeat.

    Args:
      window: the window so far.
      loaded: the result of `load` or `keep`, leaves [R, S, …]; weights that are not prefetched are taken from it.
      repeat: the repeat that each stage works on next, int [S].
      where: the stages whose slot is replaced, bool [S].
    """
    if not self.has_slots:
      return window
    in_buffer = [buffer is not None for buffer in window.buffer]
    slots = [Layout(each.gathered, 0) for each in self.layouts]
    sources = [buffer if buffer is not None else w for buffer, w in zip(window.buffer, loaded, strict=True)]
    layouts = [
        each.by_device if i else stored for i, each, stored in zip(in_buffer, self.layouts, self._loaded(1), strict=True)
    ]

    def replace(where, repeat, *arrays):
      new, old = list(arrays[: len(slots)]), list(arrays[len(slots) :])

      def take(new, old):
        own = [
            w[0] if i else jax.lax.dynamic_index_in_dim(w, repeat, keepdims=False)
            for i, w in zip(in_buffer, new, strict=True)
        ]
        return [w.astype(slot.dtype) for w, slot in zip(own, old, strict=True)]

      # A `cond` instead of a `where` copies the slot once per repeat and not at every iteration.
      return jax.lax.cond(where, take, lambda new, old: old, new, old)

    args = [*sources, *window.slot]
    return window._replace(slot=per_stage(replace, self.mesh, [where, repeat], args, [*layouts, *slots], slots))

  def is_prefetched(self, layout: WeightLayout) -> bool:
    """Whether a weight is gathered into the prefetch buffer, in pieces, before it moves to the slot."""
    return self.residency.prefetches and layout.needs_gather

  def _with_layouts(self, arrays: Arrays):
    return zip(self.layouts, arrays, strict=True)

  def _loaded(self, stages: int) -> list[Layout]:
    """The layouts in which `load` returns weights, with `stages` dimensions before that of the stages."""
    spec = lambda layout: layout.gathered if self.residency.gathers_first else layout.sharded
    return [Layout(P(*(None,) * stages, *spec(each)), stages) for each in self.layouts]

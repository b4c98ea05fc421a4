# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""How long gathered weights stay: the only thing in which the circular pipelines differ.

| residency   | gathers per weight and step          | gathered weights held      |
|-------------|--------------------------------------|----------------------------|
| `iteration` | at every iteration, both directions  | none                       |
| `repeat`    | once forward, once backward          | two repeats of a stage     |
| `once`      | once                                 | all repeats of a stage     |

With `repeat`, weights are in a window of two slots that slides over the repeats, on each stage in its own time. A stage
computes with `slot` while its next repeat comes into `spare`, a piece per iteration; when the repeat begins, the spare
becomes the slot. No stage waits for a gather and none holds a third repeat.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import enum
import math
from typing import NamedTuple

import jax
from jax.sharding import Mesh, PartitionSpec as P
import jax.numpy as jnp

from maxtext_pp_ext.engine.per_stage import Layout, per_stage
from maxtext_pp_ext.engine.transfer import Transfer
from maxtext_pp_ext.sharding import constrain
from maxtext_pp_ext.sharding.resolve import mesh_axes

Arrays = list[jax.Array]
Spare = list[jax.Array | None]


class Residency(enum.Enum):
  """When a weight is gathered over the data-like mesh axes."""

  ITERATION = "iteration"
  REPEAT = "repeat"
  ONCE = "once"


class Combination(NamedTuple):
  """How the gradients that a weight gets from several microbatches become one.

  Attributes:
    add: (a, b) -> both, elementwise, associative and commutative.
    nothing: the value that adds nothing; what accumulators begin with and what a bubble contributes.
  """

  add: Callable[[jax.Array, jax.Array], jax.Array]
  nothing: float


SUM = Combination(jnp.add, 0.0)
# For state whose "gradient" is its next value, found from the largest element of an activation: the next value for all
# microbatches together is the largest of theirs. (Flax's fp8 scales and amax histories; its own dtype for them, fm32,
# adds so.)
MAX = Combination(jnp.maximum, -math.inf)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightLayout:
  """Layouts and dtypes of one parameter [R, S, …]. Specs are those of one repeat, [S, …].

  Attributes:
    sharded: PartitionSpec as stored; in an entry of several mesh axes, those to be gathered come last.
    gathered: PartitionSpec as a stage computes with it.
    partial_axes: mesh axes over which an iteration's gradient is left as a partial sum, with one part per device along a
      leading axis (see `programs/partial.py`); empty if it is complete.
    compute_dtype: dtype in which it is gathered and handed to the stage.
    accumulation_dtype: dtype in which its gradient is summed over the microbatches of a repeat.
    combine: what takes the place of that sum. Other than SUM there are no partial sums: `partial_axes` must be empty.
  """

  sharded: P
  gathered: P
  partial_axes: tuple[str, ...]
  compute_dtype: jnp.dtype
  accumulation_dtype: jnp.dtype
  combine: Combination = SUM

  @property
  def gathered_axes(self) -> tuple[tuple[str, ...], ...]:
    """For each dimension but the stages' the mesh axes over which the weight is gathered."""
    pairs = zip(self.sharded[1:], self.gathered[1:], strict=True)
    return tuple(tuple(a for a in mesh_axes(all_) if a not in mesh_axes(kept)) for all_, kept in pairs)

  @property
  def moves(self) -> bool:
    """Whether there is anything to gather."""
    return any(self.gathered_axes)

  @property
  def by_device(self) -> Layout:
    """[F, S, …]: like `gathered`, but with a part of its own on each of the F devices along `partial_axes`."""
    return Layout(P(self.partial_axes, *self.gathered), 1)

  def by_device_like(self, mesh: Mesh, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    """Zeros laid out `by_device` for a weight of the shape [S, …]."""
    parts = math.prod(mesh.shape[a] for a in self.partial_axes)
    return constrain(jnp.zeros((parts, *shape), dtype), self.by_device.spec, mesh)

  def transfer(self, mesh: Mesh, shape: tuple[int, ...], pieces: int) -> Transfer:
    """How a parameter of this shape, [R, S, …], moves in so many pieces."""
    sizes = zip(shape[2:], self.sharded[1:], strict=True)
    shard = tuple(size // math.prod(mesh.shape[a] for a in mesh_axes(entry)) for size, entry in sizes)
    return Transfer(axes=self.gathered_axes, shard=shard, pieces=pieces)


class Window(NamedTuple):
  """Gathered weights.

  slot: what the stages compute with, leaves [S, …].
  spare: what becomes the slot next, leaves [F, S, …] laid out `by_device`; None for weights that need not be gathered.
    Once a weight has come, its F parts are the same. Where it has not, they may be anything: in backward summands of a
    gradient wait there for their reduction (see `Gradients`).
  """

  slot: Arrays
  spare: Spare


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weights:
  """The weights of the repeat that each stage is at, as a residency says.

  Indices such as `repeat` are arrays [S]: each stage has its own.

  Attributes:
    residency: how long gathered weights stay.
    mesh: the device mesh.
    layouts: one per parameter.
    pieces: in how many pieces a repeat's weights come.
  """

  residency: Residency
  mesh: Mesh
  layouts: list[WeightLayout]
  pieces: int

  @property
  def has_slots(self) -> bool:
    """Whether weights stay from one iteration to the next."""
    return self.residency is not Residency.ITERATION

  def load(self, params: Arrays) -> Arrays:
    """What slots are filled from: [R, S, …]. Gathers here if weights stay gathered for the whole step."""
    if self.residency is not Residency.ONCE:
      return [constrain(w, P(None, *each.sharded), self.mesh) for each, w in self._with_layouts(params)]
    return [
        constrain(w.astype(each.compute_dtype), P(None, *each.gathered), self.mesh)
        for each, w in self._with_layouts(params)
    ]

  def keep(self, params: Arrays, loaded: Arrays) -> Arrays:
    """What backward fills slots from: what is gathered if that stays for the whole step, else the parameters.

    Where `load` changes the order of shards, backward does so again, and nothing of it is held in between.
    """
    return loaded if self.residency is Residency.ONCE else params

  def first(self, loaded: Arrays) -> Arrays:
    """The slot of repeat 0, on all stages; empty without slots."""
    if not self.has_slots:
      return []
    stored = [constrain(w[0], each.spec, self.mesh) for each, w in zip(self._loaded(0), loaded, strict=True)]
    return [constrain(w.astype(each.compute_dtype), each.gathered, self.mesh) for each, w in self._with_layouts(stored)]

  def window(self, slot: Arrays) -> Window:
    """A window with an empty spare."""
    if not self.has_slots:
      return Window([], [None] * len(self.layouts))
    empty = lambda layout, w: layout.by_device_like(self.mesh, w.shape, w.dtype) if self.fills_spare(layout) else None
    return Window(slot, [empty(each, w) for each, w in self._with_layouts(slot)])

  def at(self, slot: Arrays, loaded: Arrays, repeat: jax.Array) -> Arrays:
    """The weights of an iteration, gathered, leaves [S, …]."""
    if self.has_slots:
      # Pinned at each use, so that a loop carries them as they are used, and not in a layout of the compiler's choice.
      return [constrain(w, each.gathered, self.mesh) for each, w in self._with_layouts(slot)]
    own = lambda repeat, *stored: [jax.lax.dynamic_index_in_dim(w, repeat, keepdims=False) for w in stored]
    results = [Layout(each.sharded, 0) for each in self.layouts]
    shards = per_stage(own, self.mesh, [repeat], loaded, self._loaded(1), results)
    shards = [constrain(w.astype(each.compute_dtype), each.sharded, self.mesh) for each, w in self._with_layouts(shards)]
    return [constrain(w, each.gathered, self.mesh) for each, w in self._with_layouts(shards)]

  def bring(self, window: Window, loaded: Arrays, repeat: jax.Array, piece: jax.Array) -> Window:
    """Gathers one piece of a repeat into the spare."""
    moving = [i for i, spare in enumerate(window.spare) if spare is not None]
    if not moving:
      return window
    transfers = [self.layouts[i].transfer(self.mesh, loaded[i].shape, self.pieces) for i in moving]

    def gather(repeat, piece, *arrays):
      stored, spare = arrays[: len(moving)], arrays[len(moving) :]
      return [t.gather(w, repeat, new[0], piece)[None] for t, w, new in zip(transfers, stored, spare, strict=True)]

    stored = [Layout(P(None, *self.layouts[i].sharded), 1) for i in moving]
    gathered = [self.layouts[i].by_device for i in moving]
    args = [*(loaded[i] for i in moving), *(window.spare[i] for i in moving)]
    brought = per_stage(gather, self.mesh, [repeat, piece], args, [*stored, *gathered], gathered)
    spare = list(window.spare)
    for i, w in zip(moving, brought, strict=True):
      spare[i] = w
    return window._replace(spare=spare)

  def turn(self, window: Window, loaded: Arrays, repeat: jax.Array, where: jax.Array) -> Window:
    """Goes over to a repeat, which is in the spare, on the stages in the bool [S] `where`."""
    if not self.has_slots:
      return window
    in_spare = [spare is not None for spare in window.spare]
    slots = [Layout(each.gathered, 0) for each in self.layouts]
    sources = [spare if spare is not None else w for spare, w in zip(window.spare, loaded, strict=True)]
    layouts = [
        each.by_device if i else stored for i, each, stored in zip(in_spare, self.layouts, self._loaded(1), strict=True)
    ]

    def replace(where, repeat, *arrays):
      new, old = list(arrays[: len(slots)]), list(arrays[len(slots) :])

      def take(new, old):
        own = [
            w[0] if i else jax.lax.dynamic_index_in_dim(w, repeat, keepdims=False)
            for i, w in zip(in_spare, new, strict=True)
        ]
        return [w.astype(slot.dtype) for w, slot in zip(own, old, strict=True)]

      # A condition and not a choice: the slot is copied once per repeat and not at every iteration.
      return jax.lax.cond(where, take, lambda new, old: old, new, old)

    args = [*sources, *window.slot]
    return window._replace(slot=per_stage(replace, self.mesh, [where, repeat], args, [*layouts, *slots], slots))

  def fills_spare(self, layout: WeightLayout) -> bool:
    """Whether a weight comes into the spare, in pieces, before it goes into the slot."""
    return self.residency is Residency.REPEAT and layout.moves

  def _with_layouts(self, arrays: Arrays):
    return zip(self.layouts, arrays, strict=True)

  def _loaded(self, stages: int) -> list[Layout]:
    """How `load` lays weights out, with `stages` dimensions before that of the stages."""
    once = self.residency is Residency.ONCE
    return [Layout(P(*(None,) * stages, *(each.gathered if once else each.sharded)), stages) for each in self.layouts]

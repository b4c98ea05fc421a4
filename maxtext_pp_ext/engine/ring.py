# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The activation ring: how microbatches enter, move from stage to stage, wait, and leave.

Layout of an activation that all stages hold at once: [S, microbatch, sequence, embed], the first axis sharded over
the mesh axis `stage`. Each stage has a store for M of them: [S, M, microbatch, sequence, embed]. At stage 0, slot m
holds microbatch m whenever it waits there: as an input, between two repeats, and as an output. What arrives at another
stage goes into the same slot of its own store, and is read in the next iteration.

One rotation per iteration carries everything: stage to stage, and from the last stage back to stage 0's store. All
inputs are gathered before the first iteration, and stage 0's outputs scattered after the last one.

Over slices such transfers take long. There a stage in a bubble passes on what it reads. So the first D·S inputs come to
stage 0 while other stages wait for their first item, and the last D·S outputs go out to the stages while stages are done,
without transfers of their own:

- Input m begins at stage −⌊m / D⌋ mod S, and comes to stage 0 at the end of iteration m − 1.
- Output M − 1 − m is at stage ⌊m / D⌋ at the end.

The other inputs move to stage 0 before the first iteration, and the other outputs leave it after the last one. Outside of
the pipeline each stage has M/S successive microbatches. Which of them is the m-th here follows from where the m-th begins
(`schedule/moves.py`). Within a slice this would cost more than it saves: backward could not recompute while a cotangent
arrives, which is read until the end of the iteration, and a selection would follow the last product of each iteration.

A stage in a bubble computes, too, and its results reach nothing. Before its first item it computes on inputs, or on what
a stage before has computed of them, after the last one on that item again. On zeros all tokens would be alike, and a
layer with experts would send all of them to the same devices, for which all stages wait.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
import numpy as np

from maxtext_pp_ext.engine.per_stage import Layout, OnDevices
from maxtext_pp_ext.schedule import Schedule
from maxtext_pp_ext.schedule.moves import entries, exits, exits_back, Move, rounds, share
from maxtext_pp_ext.sharding import constrain, divisible_spec
from maxtext_pp_ext.sharding.resolve import mesh_axes

STAGE_AXIS = "stage"
_unset = jnp.zeros


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ring:
  """Moves activations for a schedule. All methods are pure."""

  schedule: Schedule  # which stage works on which item at which iteration
  mesh: Mesh  # device mesh; its `stage` axis has size S or 1, or is absent
  activation_spec: P  # PartitionSpec of one microbatch [microbatch, sequence, embed]
  # for tests: what a stage computes on in a bubble, such as NaN. Results of bubbles reach neither outputs nor gradients,
  # whatever the inputs are.
  bubble_fill: float | None = None

  @property
  def _is_sharded(self) -> bool:
    return self.mesh.shape.get(STAGE_AXIS, 1) > 1

  def spec(self, *leading: Any) -> P:
    """PartitionSpec of a microbatch with these leading axes."""
    return P(*leading, *self.activation_spec)

  @property
  def sends_back_at_once(self) -> bool:
    """Whether a cotangent leaves in the iteration that computes it, beside gradients of weights.

    With D = 2 it has a whole iteration to travel.
    """
    return self.schedule.over_slices and self.schedule.delay == 1

  @property
  def _passes_on(self) -> bool:
    return self.schedule.over_slices and self.schedule.stages > 1

  @property
  def stages_spec(self) -> P:
    return self.spec(STAGE_AXIS if self._is_sharded else None)

  @property
  def _last_read(self) -> int:
    """The last iteration in which stage 0 reads an item for the first time."""
    schedule = self.schedule
    return schedule.iteration(schedule.repeats - 1, schedule.microbatches - 1, 0)

  def batch_axes(self, inputs: jax.Array) -> list[tuple[int, tuple[str, ...]]]:
    """(size, mesh axes) of the microbatch and sequence axes, for inputs [M, microbatch, sequence, embed]."""
    spec = divisible_spec(self.activation_spec, inputs.shape[1:], self.mesh)
    return [(size, mesh_axes(entry)) for size, entry in zip(inputs.shape[1:3], spec[:2], strict=True)]

  def constrain(self, x: jax.Array) -> jax.Array:
    """Lays an array [S, microbatch, sequence, embed] out over the stages."""
    return constrain(x, self.stages_spec, self.mesh)

  def _stage_index(self, ndim: int) -> jax.Array:
    """[S, 1, …]: the number of each stage, to mask an array of rank `ndim`."""
    return jnp.arange(self.schedule.stages, dtype=jnp.int32).reshape((-1,) + (1,) * (ndim - 1))

  def is_bubble(self, t: jax.Array | int, ndim: int) -> jax.Array:
    """[S, 1, …]: whether each stage is idle at iteration t."""
    return self.schedule.is_bubble(t, self._stage_index(ndim))

  def _on_stage_axis(self, fn, spec: P, *arrays: jax.Array, out: P | None = None) -> jax.Array:
    in_specs = (spec,) * len(arrays)
    return jax.shard_map(fn, mesh=self.mesh, in_specs=in_specs, out_specs=out or spec, check_vma=False)(*arrays)

  @jax.named_scope("permute")
  def _permute(self, x: jax.Array, step: int) -> jax.Array:
    """Moves an array [S, …] around the ring: the part of stage s to stage s + step."""
    stages = self.schedule.stages
    if stages == 1:
      return x
    if not self._is_sharded:
      return jnp.roll(x, step, axis=0)
    spec = divisible_spec(self.stages_spec, x.shape, self.mesh)
    pairs = [(s, (s + step) % stages) for s in range(stages)]
    return self._on_stage_axis(lambda a: jax.lax.ppermute(a, STAGE_AXIS, pairs), spec, x)

  def rotate(self, x: jax.Array) -> jax.Array:
    """Moves each stage's output to the next stage, and the last stage's to stage 0. [S, microbatch, sequence, embed]."""
    return self._permute(x, 1)

  def rotate_back(self, x: jax.Array) -> jax.Array:
    """The transpose of `rotate`."""
    return self._permute(x, -1)

  @jax.named_scope("enter")
  def enter(self, inputs: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """Brings microbatches [M, microbatch, sequence, embed] to where they begin; within a slice, to all stages.

    Returns:
      (store, with D = 2 what is in transfer before the first iteration, [S, microbatch, sequence, embed]).
    """
    if not self.schedule.over_slices:
      store = self._at_all_stages(inputs)
      return store, self.read(0, store) if self.schedule.delay == 2 else None
    stored, in_transfer = entries(self.schedule)
    spread = self._at_their_stages(inputs)
    store = self._moved(stored, spread, self.schedule.microbatches)
    return store, self._moved(in_transfer, spread, 1)[:, 0] if in_transfer else None

  @jax.named_scope("enter")
  def enter_back(self, dstore: jax.Array, dheld: jax.Array | None) -> jax.Array:
    """The transpose of `enter`, as far as microbatches reach anything."""
    if not self.schedule.over_slices:
      return self._from_stage_0(dstore)
    stored, in_transfer = entries(self.schedule)
    dspread = self._moved([move.reversed for move in stored], dstore, share(self.schedule))
    if dheld is not None:
      dspread = self._moved([move.reversed for move in in_transfer], dheld[:, None], share(self.schedule), into=dspread)
    return self._in_a_row(dspread)

  @jax.named_scope("leave")
  def leave(self, store: jax.Array) -> jax.Array:
    """Spreads the outputs over the stages: store -> [M, microbatch, sequence, embed], M sharded over `stage`."""
    if not self.schedule.over_slices:
      return self._from_stage_0(store)
    return self._in_a_row(self._moved(exits(self.schedule), store, share(self.schedule)))

  @jax.named_scope("leave")
  def leave_back(self, doutputs: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """The transpose of `leave`. Slots from which no output leaves have any value.

    Returns:
      (cotangent of the store, with `sends_back_at_once` what is in transfer before the last iteration, [S, microbatch,
      sequence, embed]).
    """
    if not self.schedule.over_slices:
      return self._at_all_stages(doutputs), None
    spread = self._at_their_stages(doutputs)
    if not self.sends_back_at_once:
      return self._moved([move.reversed for move in exits(self.schedule)], spread, self.schedule.microbatches), None
    stored, in_transfer = exits_back(self.schedule)
    return self._moved(stored, spread, self.schedule.microbatches), self._moved(in_transfer, spread, 1)[:, 0]

  def _at_all_stages(self, microbatches: jax.Array) -> jax.Array:
    """[M, …] -> [S, M, …]."""
    if not self._is_sharded:
      store = jnp.broadcast_to(microbatches[None], (self.schedule.stages, *microbatches.shape))
      return constrain(store, self.spec(None, None), self.mesh)
    spec = divisible_spec(self.spec(STAGE_AXIS), microbatches.shape, self.mesh)
    collect = lambda part: jax.lax.all_gather(part, STAGE_AXIS, tiled=True)[None]
    return self._on_stage_axis(collect, spec, constrain(microbatches, spec, self.mesh), out=_with_stages(spec))

  def _from_stage_0(self, store: jax.Array) -> jax.Array:
    """Stage 0's part of a store, [S, M, …] -> [M, …], M sharded over `stage`."""
    if not self._is_sharded:
      return store[0]
    spec = divisible_spec(self.spec(STAGE_AXIS), store.shape[1:], self.mesh)

    def spread(part):  # [1, M, …]; x + 0 is exact, so a sum with zeros is a transfer
      part = jnp.where(jax.lax.axis_index(STAGE_AXIS) == 0, part[0], jnp.zeros_like(part[0]))
      return jax.lax.psum_scatter(part, STAGE_AXIS, tiled=True)

    return self._on_stage_axis(spread, _with_stages(spec), store, out=spec)

  def _at_their_stages(self, microbatches: jax.Array) -> jax.Array:
    """[M, …] -> [S, M/S, …]: the microbatches that each stage has outside of the pipeline."""
    x = microbatches.reshape(self.schedule.stages, share(self.schedule), *microbatches.shape[1:])
    return constrain(x, self.spec(self.stages_spec[0], None), self.mesh)

  def _in_a_row(self, spread: jax.Array) -> jax.Array:
    """The transpose of `_at_their_stages`."""
    microbatches = spread.reshape(-1, *spread.shape[2:])
    return constrain(microbatches, self.spec(self.stages_spec[0]), self.mesh)

  def _moved(self, moves: Sequence[Move], x: jax.Array, slots: int, into: jax.Array | None = None) -> jax.Array:
    """[S, from, …] -> [S, slots, …]; in what nothing moves to, `into` or any value."""
    if all(move.source == move.target for move in moves) and x.shape[1] == slots:
      return x
    into = _unset((x.shape[0], slots, *x.shape[2:]), x.dtype) if into is None else into
    if not self._is_sharded:
      for move in moves:
        (source, at), (target, to) = move.source, move.target
        into = into.at[target, to : to + move.size].set(x[source, at : at + move.size])
      return constrain(into, self.spec(None, None), self.mesh)
    spec = divisible_spec(self.spec(STAGE_AXIS, None), x.shape, self.mesh)
    between_devices = lambda x, into: _moved_between_devices(moves, x[0], into[0])[None]
    return self._on_stage_axis(between_devices, spec, *(constrain(each, spec, self.mesh) for each in (x, into)))

  def constrain_iterations(self, x: jax.Array) -> jax.Array:
    """Lays a buffer with a value per iteration, [T, S, …], out over the stages; the compiler lays out the other axes.

    A kernel's residual may have an axis of all devices in place of the stages'. The compiler lays it out, too.
    """
    stage = STAGE_AXIS if self._is_sharded and x.shape[1] == self.schedule.stages else P.UNCONSTRAINED
    return constrain(x, P(None, stage, *(P.UNCONSTRAINED,) * (x.ndim - 2)), self.mesh)

  def read(self, t: jax.Array | int, store: jax.Array) -> jax.Array:
    """The stages' inputs at iteration t; after its last item a stage reads that item's input again.

    Args:
      t: iteration.
      store: [S, M, microbatch, sequence, embed].
    """
    # Stage s has its last item D·s iterations after stage 0.
    later = self.schedule.delay * self._stage_index(1) if self.schedule.stages > 1 else 0
    at = jnp.minimum(t, self._last_read + later)
    x = self._at_stage_0_or(at, self._slot_of_arrival(at - 1), store)
    if self.bubble_fill is not None:
      x = jnp.where(self.is_bubble(t, x.ndim), jnp.asarray(self.bubble_fill, x.dtype), x)
    return self.constrain(x)

  def pass_on(self, t: jax.Array | int, store: jax.Array, y: jax.Array) -> jax.Array:
    """What leaves the stages at iteration t: outputs y [S, microbatch, sequence, embed].

    Over slices a stage in a bubble sends what has arrived instead.
    """
    if not self._passes_on:
      return y
    arrived = self._at_stage_0_or(self._slot_of_read(t), self._slot_of_arrival(t - 1), store)
    return jnp.where(self.is_bubble(t, y.ndim), arrived, y)

  def pass_on_back(self, t: jax.Array | int, dleaving: jax.Array, dx: jax.Array) -> jax.Array:
    """The transpose of `pass_on` and of the stages: cotangents of what they have read or passed on."""
    return jnp.where(self.is_bubble(t, dx.ndim), dleaving, dx) if self._passes_on else dx

  def write(self, t: jax.Array | int, arrived: jax.Array, store: jax.Array) -> jax.Array:
    """Puts the activations that arrived at the end of iteration t, [S, microbatch, sequence, embed], into the stores."""
    return jax.lax.dynamic_update_index_in_dim(store, arrived, self._slot_of_arrival(t), axis=1)

  def write_back(self, t: jax.Array | int, dstore: jax.Array) -> jax.Array:
    """The transpose of `write` with respect to what arrives at the end of iteration t.

    A slot needs no clearing. Each of its values that reaches anything is read or passed on once, and `read_back`
    overwrites the slot.

    Args:
      t: iteration.
      dstore: cotangent of the store after iteration t, [S, M, microbatch, sequence, embed].
    """
    return self._at_stage_0_or(self._slot_of_arrival(t), self._slot_of_read(t + 1), dstore)

  def read_back(self, t: jax.Array | int, dx: jax.Array, dstore: jax.Array) -> jax.Array:
    """The transpose of reading what the stages compute on, or pass on.

    Args:
      t: iteration.
      dx: cotangent of what the stages have read or passed on, [S, microbatch, sequence, embed].
      dstore: cotangent of the store before, [S, M, microbatch, sequence, embed].
    """
    return jax.lax.dynamic_update_index_in_dim(dstore, dx, self._slot_of_read(t), axis=1)

  def _slot_of_arrival(self, t: jax.Array | int) -> jax.Array | int:
    """Where `write` puts what arrives at the end of iteration t.

    Before the first item arrives at stage 0, that is the input that it reads in the next iteration, or nothing that it
    needs, for which the slot that it has just read is free.
    """
    item = self.schedule.arrival(t)
    before = t + 1 if self.schedule.over_slices else t
    into = item if self.schedule.arrival(0) >= 0 else jnp.where(item >= 0, item, before)
    return into % self.schedule.microbatches

  def _slot_of_read(self, t: jax.Array | int) -> jax.Array:
    """Where stage 0 has what it reads or passes on at iteration t, and where `read_back` puts its cotangent.

    The other stages put cotangents there, too. What stage 0 reads after its last item reaches nothing if it is not passed
    on. Then the slot of what arrives at the end of the iteration is free, from which `write_back` has just read.
    """
    after = self.schedule.arrival(t - 1 if self.schedule.over_slices else t)
    slot = jnp.where(jnp.asarray(t) > self._last_read, after, t)
    return slot % self.schedule.microbatches

  def _at_stage_0_or(self, first: jax.Array | int, others: jax.Array | int, store: jax.Array) -> jax.Array:
    """A slot of each stage's store, of stage 0 and of the others: [S, M, …] -> [S, …]. Slots count modulo M."""
    microbatches = self.schedule.microbatches
    if self.schedule.stages == 1:
      return jax.lax.dynamic_index_in_dim(store, first % microbatches, axis=1, keepdims=False)
    slots = jnp.where(self._stage_index(1) == 0, first, others) % microbatches
    spec = divisible_spec(self.spec(self.stages_spec[0], None), store.shape, self.mesh)
    take = lambda slot, store: [jax.lax.dynamic_index_in_dim(store, slot, axis=0, keepdims=False)]
    layouts, results = [Layout(spec, 0)], [Layout(P(spec[0], *spec[2:]), 0)]
    (x,) = OnDevices.per_stage(take, self.mesh, [slots], [store], layouts, results).run(self.mesh)
    return x


def _with_stages(spec: P) -> P:
  """The PartitionSpec [S, M, …] of arrays [M, …] whose M is sharded over the stages."""
  return P(STAGE_AXIS, None, *spec[1:])


def _moved_between_devices(moves: Sequence[Move], x: jax.Array, into: jax.Array) -> jax.Array:
  """`into` after the moves, on each device of a `shard_map` over the stages.

  Args:
    moves: no two of them to the same slot.
    x: a stage's slots that arrays come from, [from, microbatch, sequence, embed].
    into: its slots that they go to, [to, microbatch, sequence, embed].
  """
  stage, stages = jax.lax.axis_index(STAGE_AXIS), jax.lax.axis_size(STAGE_AXIS)
  for each in rounds(moves):
    sent, got = np.zeros(stages, int), np.full(stages, -1)
    for move in each:
      sent[move.source[0]], got[move.target[0]] = move.source[1], move.target[1]
    slot, count = jnp.asarray(got)[stage], each[0].size
    arrays = jax.lax.dynamic_slice_in_dim(x, jnp.asarray(sent)[stage], count, axis=0)
    if not each[0].is_within:
      arrays = jax.lax.ppermute(arrays, STAGE_AXIS, [(move.source[0], move.target[0]) for move in each])
    at = jnp.maximum(slot, 0)
    before = jax.lax.dynamic_slice_in_dim(into, at, count, axis=0)
    into = jax.lax.dynamic_update_slice_in_dim(into, jnp.where(slot >= 0, arrays, before), at, axis=0)
  return into

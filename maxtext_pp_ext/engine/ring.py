# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The activation ring: how microbatches enter, move from stage to stage, wait, and leave.

Layout of an activation that all stages hold at once: [S, microbatch, sequence, embed], the first axis sharded over
the mesh axis `stage`. Each stage has a store for M of them: [S, M, microbatch, sequence, embed]. At stage 0, slot m
holds microbatch m whenever it waits there: as an input, between two repeats, and as an output. What arrives at another
stage goes into the same slot of its own store, and is read in the next iteration.

One rotation per iteration carries everything: stage to stage, and from the last stage back to stage 0's store.
Inputs are gathered before the first iteration and outputs scattered after the last one: M microbatches each way. One
program runs on every device, so the other stages hold M slots, too.

A stage in a bubble computes on a microbatch, too, and its results reach nothing. Before its first item it begins with a
microbatch as it entered. After the last item it computes that item again: stage 0 reads its last input once more,
and sends the output around. On zeros all tokens would be alike, and a layer with experts would send all of them to the
same devices, for which all stages wait.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from maxtext_pp_ext.engine.per_stage import Layout, per_stage
from maxtext_pp_ext.schedule import Schedule
from maxtext_pp_ext.sharding import constrain, divisible_spec
from maxtext_pp_ext.sharding.resolve import mesh_axes

STAGE_AXIS = "stage"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ring:
  """Moves activations for a schedule. All methods are pure."""

  schedule: Schedule  # which stage works on which item at which iteration
  mesh: Mesh  # device mesh; its `stage` axis has size S or 1, or is absent
  activation_spec: P  # PartitionSpec of one microbatch [microbatch, sequence, embed]
  # for tests: what replaces a stage's inputs in a bubble, such as NaN. Results of bubbles reach neither outputs nor
  # gradients, whatever the inputs are.
  bubble_fill: float | None = None

  @property
  def _is_sharded(self) -> bool:
    return self.mesh.shape.get(STAGE_AXIS, 1) > 1

  def spec(self, *leading: Any) -> P:
    """PartitionSpec of a microbatch with these leading axes."""
    return P(*leading, *self.activation_spec)

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

  def _on_stage_axis(self, fn, in_spec: P, out_spec: P, x: jax.Array) -> jax.Array:
    return jax.shard_map(fn, mesh=self.mesh, in_specs=in_spec, out_specs=out_spec, check_vma=False)(x)

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
    return self._on_stage_axis(lambda a: jax.lax.ppermute(a, STAGE_AXIS, pairs), spec, spec, x)

  def rotate(self, x: jax.Array) -> jax.Array:
    """Moves each stage's output to the next stage, and the last stage's to stage 0. [S, microbatch, sequence, embed]."""
    return self._permute(x, 1)

  def rotate_back(self, x: jax.Array) -> jax.Array:
    """The transpose of `rotate`."""
    return self._permute(x, -1)

  @jax.named_scope("enter")
  def enter(self, inputs: jax.Array) -> jax.Array:
    """Brings all microbatches to stage 0: [M, microbatch, sequence, embed] -> store."""
    if not self._is_sharded:
      store = jnp.broadcast_to(inputs[None], (self.schedule.stages, *inputs.shape))
      return constrain(store, self.spec(None, None), self.mesh)
    in_spec = divisible_spec(self.spec(STAGE_AXIS), inputs.shape, self.mesh)
    collect = lambda part: jax.lax.all_gather(part, STAGE_AXIS, tiled=True)[None]
    return self._on_stage_axis(collect, in_spec, P(STAGE_AXIS, None, *in_spec[1:]), constrain(inputs, in_spec, self.mesh))

  @jax.named_scope("leave")
  def leave(self, store: jax.Array) -> jax.Array:
    """Spreads stage 0's store over the stages: store -> [M, microbatch, sequence, embed], M sharded over `stage`."""
    if not self._is_sharded:
      return store[0]
    out_spec = divisible_spec(self.spec(STAGE_AXIS), store.shape[1:], self.mesh)

    def spread(part):  # [1, M, …]; x + 0 is exact, so a sum with zeros is a transfer
      part = jnp.where(jax.lax.axis_index(STAGE_AXIS) == 0, part[0], jnp.zeros_like(part[0]))
      return jax.lax.psum_scatter(part, STAGE_AXIS, tiled=True)

    return self._on_stage_axis(spread, P(STAGE_AXIS, None, *out_spec[1:]), out_spec, store)

  def constrain_iterations(self, x: jax.Array) -> jax.Array:
    """Lays a buffer with a value per iteration, [T, S, …], out over the stages; the compiler lays out the other axes.

    A kernel's residual may have an axis of all devices in place of the stages'. The compiler lays it out, too.
    """
    stage = STAGE_AXIS if self._is_sharded and x.shape[1] == self.schedule.stages else P.UNCONSTRAINED
    return constrain(x, P(None, stage, *(P.UNCONSTRAINED,) * (x.ndim - 2)), self.mesh)

  def read(self, t: jax.Array | int, store: jax.Array) -> jax.Array:
    """The stages' inputs at iteration t: stage 0's item of that iteration, and what has arrived at the other stages.

    After its last item stage 0 reads that item's input again.

    Args:
      t: iteration.
      store: [S, M, microbatch, sequence, embed].
    """
    x = self._at_stage_0_or(jnp.minimum(t, self._last_read), self._slot_of_arrival(t - 1), store)
    if self.bubble_fill is not None:
      x = jnp.where(self.is_bubble(t, x.ndim), jnp.asarray(self.bubble_fill, x.dtype), x)
    return self.constrain(x)

  def write(self, t: jax.Array | int, arrived: jax.Array, store: jax.Array) -> jax.Array:
    """Puts the activations that arrived at the end of iteration t, [S, microbatch, sequence, embed], into the stores."""
    return jax.lax.dynamic_update_index_in_dim(store, arrived, self._slot_of_arrival(t), axis=1)

  def write_back(self, t: jax.Array | int, dstore: jax.Array) -> jax.Array:
    """The transpose of `write` with respect to what arrives at the end of iteration t; in bubbles any value.

    A slot needs no clearing. Each of its values is read once, and the transpose of that `read` overwrites the slot.

    Args:
      t: iteration.
      dstore: cotangent of the store after iteration t, [S, M, microbatch, sequence, embed].
    """
    return self._at_stage_0_or(self.schedule.arrival(t), self._slot_of_read(t + 1), dstore)

  def read_back(self, t: jax.Array | int, dx: jax.Array, dstore: jax.Array) -> jax.Array:
    """The transpose of `read`.

    Args:
      t: iteration.
      dx: cotangent of the stages' inputs, [S, microbatch, sequence, embed]; in bubbles any value.
      dstore: cotangent of the store before, [S, M, microbatch, sequence, embed].
    """
    return jax.lax.dynamic_update_index_in_dim(dstore, dx, self._slot_of_read(t), axis=1)

  def _slot_of_arrival(self, t: jax.Array | int) -> jax.Array | int:
    """Where `write` puts what arrives at the end of iteration t.

    Before the first arrival at stage 0, that item's slot may hold an input. What arrives then goes into the slot that
    stage 0 has just read.
    """
    item = self.schedule.arrival(t)
    into = item if self.schedule.arrival(0) >= 0 else jnp.where(item >= 0, item, t)
    return into % self.schedule.microbatches

  def _slot_of_read(self, t: jax.Array | int) -> jax.Array:
    """Where `read_back` puts the cotangents of what is read at iteration t.

    What stage 0 reads in a bubble reaches nothing, and its slot holds an output's cotangent. So its cotangent goes into
    the slot of what arrived at the end of the iteration, from which `write_back` has just read.
    """
    slot = jnp.where(jnp.asarray(t) > self._last_read, self.schedule.arrival(t), t)
    return slot % self.schedule.microbatches

  def _at_stage_0_or(self, first: jax.Array | int, others: jax.Array | int, store: jax.Array) -> jax.Array:
    """A slot of each stage's store, of stage 0 and of the others: [S, M, …] -> [S, …]. Slots count modulo M."""
    microbatches = self.schedule.microbatches
    if self.schedule.stages == 1:
      return jax.lax.dynamic_index_in_dim(store, first % microbatches, axis=1, keepdims=False)
    slots = jnp.where(self._stage_index(1) == 0, first, others) % microbatches
    spec = divisible_spec(self.spec(self.stages_spec[0], None), store.shape, self.mesh)
    take = lambda slot, store: [jax.lax.dynamic_index_in_dim(store, slot, axis=0, keepdims=False)]
    (x,) = per_stage(take, self.mesh, [slots], [store], [Layout(spec, 0)], [Layout(P(spec[0], *spec[2:]), 0)])
    return x

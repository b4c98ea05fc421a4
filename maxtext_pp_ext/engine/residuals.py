# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Where the values of all iterations lie: what forward saves for backward, and what stages sow.

A buffer has a value for each iteration, [T, S, …]. Of residuals in a device's memory it has a value for each item
instead, [M·R + 1, S, …], as far as that is less: a stage is at item t − D·s in iteration t, and those of bubbles need no
memory. In a bubble before its first item a stage writes where that item will be, in one after its last item into the slot
M·R.
"""

from collections.abc import Sequence
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from maxtext_pp_ext.engine.order import Saved
from maxtext_pp_ext.engine.programs.stage import StageProgram
from maxtext_pp_ext.engine.ring import Ring, STAGE_AXIS
from maxtext_pp_ext.engine.shapes import Numbers, PerIteration
from maxtext_pp_ext.engine.transfers.memory_order import in_memory
from maxtext_pp_ext.schedule import Schedule

# For each residual the buffer of each turn (`Iterations.turns`).
Buffers = list[list[PerIteration]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResidualBuffers:
  """Reads and writes residuals."""

  schedule: Schedule
  turns: int  # see `Iterations.turns`
  ring: Ring
  program: StageProgram

  def empty(self) -> Buffers:
    """Buffers without values."""
    every = range(self.schedule.iterations)
    counts = [len(every[turn :: self.turns]) for turn in range(self.turns)]
    return [
        [empty(self.ring, aval, self._items + 1 if self._is_by_item(aval) else count) for count in counts]
        for aval in self.program.saved_avals
    ]

  def put(self, saved: Buffers, residuals: list[jax.Array], t: jax.Array | int, turn: int) -> Buffers:
    """Writes an iteration's residuals into the buffers of its turn.

    Those of kernels are left in the order in which kernels return them. Otherwise the TPU compiler (libtpu 0.0.48.1;
    benchmarks.workarounds residual_of_kernel) copies all that a kernel returns, of which the residual may be a 128th.
    """
    written = []
    for k, one in enumerate(residuals):
      order = None if self.program.saved_by_kernels[k] else self.program.saved_orders[k]
      buffer = put(self.ring, saved[k][turn], one, self._index(k, t), order)
      written.append([*saved[k][:turn], buffer, *saved[k][turn + 1 :]])
    return written

  def get(self, saved: Buffers, t: jax.Array | int, turn: int) -> list[Saved]:
    """An iteration's residuals, from the buffers of its turn."""
    return [
        Saved(functools.partial(get, self.ring, all_[turn], order=self.program.saved_orders[k]), self._index(k, t))
        for k, all_ in enumerate(saved)
    ]

  @property
  def _items(self) -> int:
    return self.schedule.microbatches * self.schedule.repeats

  def _is_by_item(self, aval: Any) -> bool:
    """Whether a residual's buffer has a value for each item. The axis of stages may be one of all devices, see `Ring`."""
    is_less = self._items + 1 < self.schedule.iterations
    on_device = aval.memory_space == jax.memory.Space.Device
    return self.ring.is_sharded and is_less and on_device and aval.shape[0] == self.schedule.stages

  def _index(self, k: int, t: jax.Array | int) -> Numbers | jax.Array:
    """Where an iteration's value lies in the buffers of a residual: one slot for each stage, or one for all."""
    if self._is_by_item(self.program.saved_avals[k]):
      return jnp.clip(self.schedule.item(t, jnp.arange(self.schedule.stages, dtype=jnp.int32)), 0, self._items)
    return jnp.asarray(t // self.turns)


def empty(ring: Ring, aval: Any, count: int) -> PerIteration:
  """A buffer for this many values, without any. Residuals that a remat policy offloads arrive in host memory."""
  buffer = ring.constrain_iterations(jax.lax.empty((count, *aval.shape), aval.dtype))
  return buffer if aval.memory_space == jax.memory.Space.Device else jax.device_put(buffer, aval.memory_space)


def put(
    ring: Ring, all_: PerIteration, one: jax.Array, index: Numbers | jax.Array | int, order: Sequence[int] | None
) -> PerIteration:
  """Writes a value into a buffer, at one index or at one for each stage.

  Its dimensions are in this order in memory, from major to minor; with None as it comes. Left to itself, the TPU
  compiler (libtpu 0.0.48.1; benchmarks.workarounds order_of_residual) may have one order in a loop and another one behind
  it, and copy the values of all iterations in between: 6.3 GB for Qwen3 235B with a window.
  """
  one, update = _in_order(one, order), functools.partial(jax.lax.dynamic_update_index_in_dim, axis=0)
  if not jnp.ndim(index):
    return update(all_, one, index)
  stages, of_buffer = P(STAGE_AXIS), P(None, STAGE_AXIS)
  return ring.on_stages(
      lambda all_, one, index: update(all_, one, index[0]), (of_buffer, stages, stages), of_buffer, all_, one, index
  )


def get(ring: Ring, all_: PerIteration, index: Numbers | jax.Array | int, order: Sequence[int]) -> jax.Array:
  """Reads a value from a buffer; the arguments are those of `put`."""
  read = functools.partial(jax.lax.dynamic_index_in_dim, axis=0, keepdims=False)
  if not jnp.ndim(index):
    return _in_order(read(all_, index), order)
  stages, of_buffer = P(STAGE_AXIS), P(None, STAGE_AXIS)
  return _in_order(
      ring.on_stages(lambda all_, index: read(all_, index[0]), (of_buffer, stages), stages, all_, index), order
  )


def _in_order(x: jax.Array, order: Sequence[int] | None) -> jax.Array:
  """The same array; one in the host's memory stays as it is."""
  on_device = jax.typeof(x).memory_space == jax.memory.Space.Device
  return x if order is None or not on_device else in_memory(x, order)

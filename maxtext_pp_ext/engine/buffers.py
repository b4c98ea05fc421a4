# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Buffers with a value per iteration: [T, S, …]."""

from collections.abc import Sequence
from typing import Any

import jax

from maxtext_pp_ext.engine.ring import Ring
from maxtext_pp_ext.engine.shapes import PerIteration
from maxtext_pp_ext.engine.transfers.memory_order import in_memory

_empty = jax.lax.empty


def empty(ring: Ring, aval: Any, places: int) -> PerIteration:
  """A buffer on the device for this many values [S, …] of one type."""
  return ring.constrain_iterations(_empty((places, *aval.shape), aval.dtype))


def buffer(ring: Ring, aval: Any, places: int) -> PerIteration:
  """A buffer in the memory in which the values are to be."""
  on_device = empty(ring, aval, places)
  # Residuals that a remat policy offloads arrive in host memory.
  return on_device if aval.memory_space == jax.memory.Space.Device else jax.device_put(on_device, aval.memory_space)


def put(all_: jax.Array, one: jax.Array, t: jax.Array | int, order: Sequence[int] | None) -> jax.Array:
  """Writes iteration t's value into a buffer with a leading iteration axis.

  Its dimensions are in this order in memory, from major to minor; with None as it comes. Left to itself, the TPU
  compiler (libtpu 0.0.48.1; benchmarks.workarounds order_of_residual) may have one order in a loop and another one behind
  it, and copy the values of all iterations in between: 6.3 GB for Qwen3 235B with a window.
  """
  return jax.lax.dynamic_update_index_in_dim(all_, _in_order(one, order), t, axis=0)


def get(all_: jax.Array, t: jax.Array | int, order: Sequence[int] | None) -> jax.Array:
  """Reads iteration t's value from a buffer with a leading iteration axis; `order` as in `put`."""
  return _in_order(jax.lax.dynamic_index_in_dim(all_, t, axis=0, keepdims=False), order)


def _in_order(x: jax.Array, order: Sequence[int] | None) -> jax.Array:
  """The same array; one in the host's memory stays as it is."""
  on_device = jax.typeof(x).memory_space == jax.memory.Space.Device
  return x if order is None or not on_device else in_memory(x, order)

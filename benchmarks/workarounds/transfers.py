# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Collectives that the TPU compiler replaces by others, or during which it computes nothing."""

from __future__ import annotations

from collections.abc import Sequence
import types

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import overlap
from benchmarks.workarounds.reproducer import Program
from maxtext_pp_ext.engine.transfers.memory_order import in_memory
from maxtext_pp_ext.hardware.tiles import SUBLANES

_FLAGS = types.MappingProxyType(dict(flag.lstrip("-").split("=") for flag in overlap.SPARSE_CORE_FLAGS.split()))


def _steps(*sizes: int) -> list[list[list[int]]]:
  """For each step, from major to minor, the groups of an axis' devices."""
  numbers = np.arange(np.prod(sizes)).reshape(sizes)
  return [np.moveaxis(numbers, step, -1).reshape(-1, size).tolist() for step, size in enumerate(sizes)]


def _gather(x: jax.Array, steps: Sequence[list[list[int]] | None]) -> jax.Array:
  for groups in steps:
    x = jax.lax.all_gather(x, "fsdp", tiled=True, axis_index_groups=groups)
  return x


def reduce_scatter_over_all(workaround: bool) -> Program:
  """A reduce-scatter over all devices becomes an all-reduce."""

  def run(gradient):
    for groups in _steps(4, 4) if workaround else [None]:
      gradient = jax.lax.psum_scatter(gradient, "fsdp", tiled=True, axis_index_groups=groups)
    return gradient

  return Program(run=run, given=[((512, 1024), jnp.bfloat16)], topology="v6e:4x4", mesh={"fsdp": 16})


def reduce_scatter_along_ring(workaround: bool) -> Program:
  """A reduce-scatter over 4 × 8 devices goes along one ring through all; in two steps their parts are padded, too."""

  def run(gradient):
    for groups in [None] if workaround else _steps(4, 8):
      gradient = jax.lax.psum_scatter(gradient, "fsdp", tiled=True, axis_index_groups=groups)
    return gradient

  return Program(run=run, given=[((3584, 18944), jnp.bfloat16)], topology="v6e:4x8", mesh={"fsdp": 32})


def gather_along_ring(workaround: bool) -> Program:
  """A gather of few bytes over 4 × 8 devices does not run on the SparseCores; of 32 MiB or more it does."""
  rows = 512 if workaround else 256
  return Program(
      run=lambda x, shard: (jnp.tanh(x @ x), _gather(shard, [None])),
      given=[((512, 512), jnp.bfloat16), ((rows, 1024), jnp.bfloat16)],
      topology="v6e:4x8",
      mesh={"fsdp": 32},
      flags=_FLAGS,
  )


def reduce_scatter_of_parts_of_tiles(workaround: bool) -> Program:
  """A reduce-scatter whose parts are no whole tiles becomes an all-reduce."""

  def run(gradient):
    gradient = in_memory(gradient, (1, 0)) if workaround else gradient
    part = jax.lax.psum_scatter(gradient, "fsdp", scatter_dimension=1, tiled=True)
    return in_memory(part, (1, 0)) if workaround else part

  return Program(run=run, given=[((1024, 8 * 128), jnp.bfloat16)], topology="v6e:2x4", mesh={"fsdp": 8})


def reduce_scatter_of_rows(workaround: bool) -> Program:
  """With much scoped VMEM a reduce-scatter of rows pads those of each device, and moves them to it afterwards."""
  rows, columns = 3584, 18944

  def run(gradient):
    gradient = gradient.reshape(-1, SUBLANES, columns) if workaround else gradient
    return jax.lax.psum_scatter(gradient, "fsdp", tiled=True).reshape(-1, columns)

  flags = {"xla_tpu_scoped_vmem_limit_kib": "98304"}
  return Program(run=run, given=[((rows, columns), jnp.bfloat16)], topology="v5e:4x8", mesh={"fsdp": 32}, flags=flags)


def exchange_of_two(workaround: bool) -> Program:
  """Nothing is computed during a gather between two devices, without flags."""

  def run(x, shard):
    if workaround:
      other = jax.lax.ppermute(shard, "fsdp", ((0, 1), (1, 0)))
      is_first = jax.lax.axis_index("fsdp") == 0
      weight = jnp.where(is_first, jnp.concatenate([shard, other]), jnp.concatenate([other, shard]))
    else:
      weight = jax.lax.all_gather(shard, "fsdp", tiled=True)
    return jnp.tanh(x @ x), weight

  given = [((512, 512), jnp.bfloat16), ((512, 512), jnp.bfloat16)]
  return Program(run=run, given=given, mesh={"stage": 2, "fsdp": 2})


def small_gather(workaround: bool) -> Program:
  """A gather of few bytes over many devices becomes an all-reduce."""
  steps = _steps(8, 8)[::-1] if workaround else [None]
  return Program(
      run=lambda shard: _gather(shard, steps),
      given=[((64, 1024), jnp.bfloat16)],
      topology="v6e:8x8",
      mesh={"fsdp": 64},
  )


def gather_over_several_axes(workaround: bool) -> Program:
  """A gather over several axes of the torus does not run on the SparseCores, and nothing is computed meanwhile."""
  steps = _steps(2, 2, 4)[::-1] if workaround else [None]

  def run(x, shard):
    return jnp.tanh(x @ x), _gather(shard, steps)

  given = [((512, 512), jnp.bfloat16), ((1024, 1024), jnp.bfloat16)]
  return Program(run=run, given=given, topology="v5p:2x2x4", mesh={"fsdp": 16}, flags=_FLAGS)

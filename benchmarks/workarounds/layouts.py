# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Arrays that the TPU compiler casts, or copies into another order of their dimensions, more than is needed."""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax.experimental import pallas as pl
import jax.numpy as jnp

from benchmarks.workarounds.reproducer import not_hoisted, Program
from maxtext_pp_ext.engine.transfers.memory_order import in_memory

# Repeats, and the chunks in which one is gathered.
_REPEATS, _CHUNKS = 4, 4


def _gathered_repeats(shape: tuple[int, int], order: tuple[int, int], taken: Callable[[jax.Array, jax.Array], jax.Array]):
  """A loop over the repeats of a weight, which gathers chunks in this order; `taken`: (part, t) -> what is gathered."""
  rows, columns = shape

  def run(stored, x):
    def iteration(t, x):
      start = (t // _CHUNKS, t % _CHUNKS * (rows // _CHUNKS), 0)
      (part,) = jax.lax.dynamic_slice(stored, start, (1, rows // _CHUNKS, columns))
      part = in_memory(taken(part, t).astype(jnp.bfloat16), order)
      chunk = jax.lax.all_gather(part, "fsdp", axis=1, tiled=True)
      return jnp.tanh(x @ chunk) @ chunk.T

    return jax.lax.fori_loop(0, _REPEATS * _CHUNKS, iteration, x)

  given = [((_REPEATS, rows, columns), jnp.float32), ((256, rows // _CHUNKS), jnp.bfloat16)]
  return Program(run=run, given=given)


def cast_of_all_repeats(workaround: bool) -> Program:
  """All repeats of a weight are cast before the loop that gathers a chunk of one, and are held."""
  return _gathered_repeats((512, 512), (0, 1), not_hoisted if workaround else lambda part, t: part)


def order_of_parameter(workaround: bool) -> Program:
  """A parameter lies in the order with least padding, not in its own, and chunks taken in its own order are copied."""
  return _gathered_repeats((2048, 448), (1, 0) if workaround else (0, 1), not_hoisted)


def order_of_residual(workaround: bool) -> Program:
  """A residual is in another order where it is written than where it is read, and is copied."""
  iterations, rows, sequence, heads, head_dim = 8, 2, 512, 4, 128
  order = (0, 2, 1, 3)

  def attention(query, activation=lambda scores: scores):
    weights = activation(jnp.einsum("bhsd,bhtd->bhst", query, query))
    return jnp.einsum("bhst,bhtd->bhsd", weights, query)

  def run(x, weight):
    def forward(t, carry):
      x, saved = carry
      query = jnp.einsum("bse,ehd->bshd", x, weight)
      one = in_memory(query, order) if workaround else query
      saved = jax.lax.dynamic_update_index_in_dim(saved, one, t, 0)
      return jnp.einsum("bhsd,ehd->bse", attention(query.swapaxes(1, 2), jax.nn.softmax), weight), saved

    def backward(t, total):
      one = jax.lax.dynamic_index_in_dim(saved, iterations - 1 - t, keepdims=False)
      one = in_memory(one, order) if workaround else one
      return total + jnp.einsum("bhsd,ehd->bse", attention(one.swapaxes(1, 2)), weight)

    empty = jax.lax.empty((iterations, rows, sequence, heads, head_dim), x.dtype)
    x, saved = jax.lax.fori_loop(0, iterations, forward, (x, empty))
    return jax.lax.fori_loop(0, iterations, backward, x)

  embed = heads * head_dim
  return Program(run=run, given=[((rows, sequence, embed), jnp.bfloat16), ((embed, heads, head_dim), jnp.bfloat16)])


def order_of_finished_sum(workaround: bool) -> Program:
  """The sum of a gradient is copied into another order before a chunk is taken out of it."""
  rows, embed, heads, head_dim = 256, 512, 8, 128
  size = embed // _CHUNKS

  def run(x, cotangent, stored):
    def iteration(t, carry):
      total, stored = carry
      waiting = in_memory(total, (1, 0, 2)) if workaround else total
      chunk = jax.lax.dynamic_slice_in_dim(waiting, t % _CHUNKS * size, size).astype(jnp.bfloat16)
      chunk = jax.lax.psum_scatter(in_memory(chunk, (0, 1, 2)), "fsdp", tiled=True)
      stored = jax.lax.dynamic_update_slice_in_dim(stored, chunk, t % _CHUNKS * (size // 4), 0)
      cotangents = not_hoisted(cotangent, t)
      gradient = jnp.einsum("be,bhd->ehd", x, cotangents, preferred_element_type=jnp.float32)
      return total / 2 + gradient, stored

    zeros = jnp.zeros((embed, heads, head_dim), jnp.float32)
    return jax.lax.fori_loop(0, 2 * _CHUNKS, iteration, (zeros, stored))

  shapes = ((rows, embed), (rows, heads, head_dim), (embed // 4, heads, head_dim))
  return Program(run=run, given=[(shape, jnp.bfloat16) for shape in shapes])


def residual_of_kernel(workaround: bool) -> Program:
  """Of what a kernel returns all is copied into the order of a part of it."""
  iterations, shape = 4, (2, 4, 512, 128)

  def kernel(given, scaled, largest):
    scaled[...] = given[...] * 2
    largest[...] = jnp.broadcast_to(jnp.max(given[...].astype(jnp.float32), axis=-1, keepdims=True), largest.shape)

  block = pl.BlockSpec((1, *shape[2:]), lambda head: (head, 0, 0))
  returned = [jax.ShapeDtypeStruct(shape[1:], dtype) for dtype in (jnp.bfloat16, jnp.float32)]
  call = pl.pallas_call(kernel, grid=shape[1:2], in_specs=[block], out_specs=[block, block], out_shape=returned)

  def run(x):
    def forward(t, carry):
      x, saved = carry
      x, largest = jax.vmap(call)(x)
      one = largest[..., 0] if workaround else in_memory(largest[..., 0], (0, 1, 2))
      return x, jax.lax.dynamic_update_index_in_dim(saved, one, t, 0)

    def backward(t, x):
      one = jax.lax.dynamic_index_in_dim(saved, iterations - 1 - t, keepdims=False)
      return x * in_memory(one, (0, 1, 2))[..., None].astype(x.dtype)

    empty = jax.lax.empty((iterations, *shape[:3]), jnp.float32)
    x, saved = jax.lax.fori_loop(0, iterations, forward, (x, empty))
    return jax.lax.fori_loop(0, iterations, backward, x)

  return Program(run=run, given=[(shape, jnp.bfloat16)])


def part_of_kernel(workaround: bool) -> Program:
  """One lane of what a kernel returns is cut out twice, for two kernels that read it in different orders."""
  heads, rows, lanes = 64, 4096, 128

  def largest_of(given, largest):
    largest[...] = jnp.broadcast_to(jnp.max(given[...].astype(jnp.float32), axis=-1, keepdims=True), largest.shape)

  def scale(given, by, scaled):
    scaled[...] = given[...] * by[:, :1].astype(given.dtype)

  def kernel(body, given, dtype):
    blocks = [pl.BlockSpec((1, *each.shape[1:]), lambda head: (head, 0, 0)) for each in given]
    result = jax.ShapeDtypeStruct(given[0].shape, dtype)
    return pl.pallas_call(body, grid=(heads,), in_specs=blocks, out_specs=blocks[0], out_shape=result)(*given)

  def run(x, turned):
    largest = kernel(largest_of, [x], jnp.float32)[..., 0]
    largest = jax.lax.optimization_barrier(largest) if workaround else largest
    one, eight = (jnp.broadcast_to(largest[:, None], (heads, number, rows)) for number in (1, 8))
    return [kernel(scale, [turned, by], turned.dtype) for by in (one, eight)]

  return Program(run=run, given=[((heads, rows, lanes), jnp.bfloat16), ((heads, lanes, rows), jnp.bfloat16)])


def order_of_weight(workaround: bool) -> Program:
  """A product reads a weight [embed, heads, head_dim] as one matrix per head, and copies one in its own order."""
  iterations, rows, embed, heads, head_dim = 8, 256, 512, 4, 128
  order, of_buffers = ((1, 0, 2), (0, 2, 1, 3)) if workaround else ((0, 1, 2), (0, 1, 2, 3))

  def run(x, weight):
    def iteration(t, carry):
      x, buffers = carry
      buffers = in_memory(buffers, of_buffers)
      current = in_memory(jax.lax.dynamic_index_in_dim(buffers, t % 2, keepdims=False), order)
      query = jnp.einsum("be,ehd->bhd", x, current)
      x = jnp.einsum("bhd,ehd->be", jnp.tanh(query), current)
      part = jnp.tanh(query[None, : embed // iterations])
      buffers = jax.lax.dynamic_update_slice(buffers, part, ((t + 1) % 2, t * (embed // iterations), 0, 0))
      return x, in_memory(buffers, of_buffers)

    both = in_memory(jnp.stack([weight, 2 * weight]), of_buffers)
    return jax.lax.fori_loop(0, iterations, iteration, (x, both))[0]

  return Program(run=run, given=[((rows, embed), jnp.bfloat16), ((embed, heads, head_dim), jnp.bfloat16)])


def order_of_output_projection(workaround: bool) -> Program:
  """A product reads [heads, head_dim, embed] in its own order at half the rate, if head_dim is half a matrix unit."""
  rows, heads, head_dim, embed = 2048, 16, 128, 2048
  matrix = (embed, head_dim) if workaround else (head_dim, embed)

  def run(context, weight):
    weight = weight.swapaxes(1, 2) if workaround else weight
    return in_memory(jnp.einsum("hbd,hde->be", context, weight), (0, 1))

  return Program(run=run, given=[((heads, rows, head_dim), jnp.bfloat16), ((heads, *matrix), jnp.bfloat16)])


def order_of_all_repeats(workaround: bool) -> Program:
  """Chunks are copied into another order to be gathered in it, and again to be placed."""
  embed, heads, head_dim, devices = 512, 4, 128, 4
  size = embed // _CHUNKS

  def run(stored, x):
    def iteration(t, carry):
      x, buffers = carry
      chunk = t % _CHUNKS * size
      (part,) = jax.lax.dynamic_slice(stored, (t // _CHUNKS, chunk, 0, 0), (1, size, heads, head_dim))
      part = in_memory(part, (0, 1, 2)) if workaround else part
      gathered = jax.lax.all_gather(part[None], "fsdp", tiled=True)
      by_device = buffers.reshape(2, devices, embed, heads, head_dim)
      by_device = jax.lax.dynamic_update_slice(by_device, gathered[None], ((t + 1) % 2, 0, chunk, 0, 0))
      buffers = in_memory(by_device.reshape(buffers.shape), (0, 1, 2, 3))
      weight = in_memory(jax.lax.dynamic_index_in_dim(buffers, t % 2, keepdims=False), (0, 1, 2))
      matrix = weight.reshape(devices * embed, heads * head_dim)
      return jax.lax.optimization_barrier((jnp.tanh(x @ matrix) @ matrix.T, buffers))

    empty = in_memory(jnp.zeros((2, devices * embed, heads, head_dim), stored.dtype), (0, 1, 2, 3))
    return jax.lax.fori_loop(0, _REPEATS * _CHUNKS, iteration, (x, empty))[0]

  given = [((_REPEATS, embed, heads, head_dim), jnp.bfloat16), ((128, devices * embed), jnp.bfloat16)]
  return Program(run=run, given=given)

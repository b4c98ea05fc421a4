# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""What the TPU compiler computes several times, or at another time than it would take least memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from benchmarks.workarounds.reproducer import Program

_LAYERS, _ROWS, _EMBED, _MLP = 4, 1024, 256, 1024


def factor_of_products(workaround: bool) -> Program:
  """An activation's derivative is computed again within each product that it is a factor of."""

  def run(x, weight, hidden, cotangent):
    _, silu = jax.vjp(jax.nn.silu, hidden)
    (factor,) = silu(cotangent)
    factor = jax.lax.optimization_barrier(factor) if workaround else factor
    return x.T @ factor, factor @ weight.T

  shapes = ((1024, 512), (512, 1024), (1024, 1024), (1024, 1024))
  return Program(run=run, given=[(shape, jnp.bfloat16) for shape in shapes])


def gradients_at_the_end(workaround: bool) -> Program:
  """Gradients of several layers are computed at the end of an iteration, behind all that they need."""

  def layer(x, weights):
    up, down = weights
    return x + jax.nn.silu(x @ up) @ down

  def run(x, cotangent, *weights):
    layers = list(zip(weights[::2], weights[1::2], strict=True))

    def iteration(_, carry):
      sums, cotangent = carry
      inputs = [x]
      for each in layers[:-1]:
        inputs.append(layer(inputs[-1], each))
      sums = list(sums)
      for i in reversed(range(_LAYERS)):
        _, backward = jax.vjp(layer, inputs[i], layers[i])
        cotangent, gradients = backward(cotangent)
        sums[i] = [total + gradient for total, gradient in zip(sums[i], gradients, strict=True)]
        if workaround:
          cotangent, sums[i] = jax.lax.optimization_barrier((cotangent, sums[i]))
      return sums, jax.lax.ppermute(cotangent, "fsdp", [(k, (k + 1) % 4) for k in range(4)])

    zeros = [[jnp.zeros(weight.shape, jnp.float32) for weight in each] for each in layers]
    return jax.lax.fori_loop(0, 8, iteration, (zeros, cotangent))

  of_layer = ((_EMBED, _MLP), (_MLP, _EMBED))
  shapes = ((_ROWS, _EMBED), (_ROWS, _EMBED), *of_layer * _LAYERS)
  return Program(run=run, given=[(shape, jnp.bfloat16) for shape in shapes])


def buffer_written_twice(workaround: bool) -> Program:
  """The memory of a buffer that a loop's body writes into twice is counted twice, and operations are computed again."""
  iterations, shape = 600, (8192, 2048)  # 20 GB of the 34 of a v6e
  buffers = 2 if workaround else 1

  def write(saved, x, t, turn):
    at, index = (turn, t) if workaround else (0, 2 * t + turn)
    return [*saved[:at], jax.lax.dynamic_update_index_in_dim(saved[at], x, index, 0), *saved[at + 1 :]]

  def read(saved, t, turn):
    return saved[turn][t] if workaround else saved[0][2 * t + turn]

  def run(x):
    def forward(t, carry):
      x, saved = carry
      for turn in range(2):
        saved = write(saved, x, t, turn)
        result = jnp.exp(x)
        x = jax.lax.optimization_barrier(jax.lax.optimization_barrier(2 * result) + 1) * result
      return x, saved

    def backward(t, x):
      for turn in (1, 0):
        x = x * read(saved, iterations // 2 - 1 - t, turn)
      return x

    empty = [jax.lax.empty((iterations // buffers, *shape), x.dtype) for _ in range(buffers)]
    x, saved = jax.lax.fori_loop(0, iterations // 2, forward, (x, empty))
    return jax.lax.fori_loop(0, iterations // 2, backward, x)

  return Program(run=run, given=[(shape, jnp.bfloat16)])

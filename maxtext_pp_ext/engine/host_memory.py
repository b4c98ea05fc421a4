# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Residuals on their way to the host's memory and back, in iterations other than those that compute or read them.

Forward sends in an iteration what the one before has computed. In loops of one iteration, backward fetches what the next
one reads. In loops of two the TPU compiler fetches ahead itself, and better: a step of Llama 3 70B with two arrays
offloaded takes 10.05 s instead of 10.10 (v5p-256, window).
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from maxtext_pp_ext.engine.buffers import empty, get, put
from maxtext_pp_ext.engine.shapes import PerIteration, Residual
from maxtext_pp_ext.engine.traced import Part, TracedPipeline

Travelling = list[Residual | None]  # for each residual of an iteration the array, or None if it stays on the device


def nothing_to_send(pipeline: TracedPipeline, part: Part) -> Travelling:
  """What a part's first iteration sends in the place of residuals: any value, into a place that is written again."""
  avals, sends = part.program.saved_avals, part.program.saved_to_send
  return [empty(pipeline.ring, aval, 1)[0] if sends[k] else None for k, aval in enumerate(avals)]


def sent(
    pipeline: TracedPipeline,
    number: int,
    saved: Sequence[Sequence[PerIteration]],
    to_send: Travelling,
    t: jax.Array | int,
    turn: int,
) -> list[list[PerIteration]]:
  """The buffers at the beginning of iteration t, with what the one before has left sent to the host's memory.

  If the iteration that computes an array sent it, transfers could take no longer than the rest of the iteration. The TPU
  compiler then waits for the last ones, or sends at the beginning of the next iteration what it takes from the end of
  one, and waits for each until its place is free.

  Args:
    pipeline: the pipeline.
    number: the number of the part.
    saved: its buffers, for each residual that of each turn.
    to_send: what the iteration before has left.
    t: the iteration, which may be the one behind the part's last.
    turn: its turn.
  """
  part, turns = pipeline.parts[number], pipeline.iterations.turns
  # The first iteration sends nothing in particular, to a place that is written again.
  place, last = jnp.maximum(part.place(t - 1, turns), 0), (turn - 1) % turns
  buffers = [list(of_turns) for of_turns in saved]
  for k, one in enumerate(to_send):
    if one is not None:
      on_host = jax.device_put(one, jax.memory.Space.Host)
      buffers[k][last] = put(buffers[k][last], on_host, place, None)
  return buffers


def fetched(
    pipeline: TracedPipeline, number: int, saved: Sequence[Sequence[PerIteration]], t: jax.Array | int
) -> Travelling:
  """What iteration t's backward reads of the host's memory; any value if t is before the part's first iteration.

  One array is fetched after the other. To the TPU compiler's scheduler they would otherwise travel at the same time, each
  as fast as alone. It would begin all of them as late as the longest one needs: 0.4 s of a step of Mistral 7B on v6e-8.

  Args:
    pipeline: the pipeline.
    number: the number of the part.
    saved: its buffers, for each residual that of each turn.
    t: the iteration.
  """
  part, iterations, arrays = pipeline.parts[number], pipeline.iterations, Travelling()
  ahead = iterations.compiled and iterations.turns == 1
  place = jnp.maximum(jnp.asarray(part.place(t, iterations.turns)), 0)
  for k, buffers in enumerate(saved):
    if not ahead or not part.program.saved_to_send[k]:
      arrays.append(None)
      continue
    one = jax.device_put(get(buffers[0], place, None), jax.memory.Space.Device)
    one, place = jax.lax.optimization_barrier((one, place))
    arrays.append(one)
  return arrays

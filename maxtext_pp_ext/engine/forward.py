# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The forward loops; see `engine.py` for the pseudo-code."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax

from maxtext_pp_ext.engine.traced import TracedPipeline
from maxtext_pp_ext.engine.transfers.memory_order import in_memory
from maxtext_pp_ext.engine.weights import Arrays, Window, Windowed
from maxtext_pp_ext.schedule import Phase

PyTree = Any


class ForwardState(NamedTuple):
  """The state that an iteration reads and replaces.

  Attributes:
    shift, store: the ring's buffers, see `ring.py`, [S, microbatch, sequence, embed] and [S, M, microbatch, sequence,
      embed].
    held: with D = 2 the previous iteration's outputs, still in transfer, laid out like shift; None with D = 1.
    intermediates: leaves [T, S, …].
    saved: residuals for backward, leaves [T, S, …]; empty if there is no backward.
  """

  shift: jax.Array
  store: jax.Array
  held: jax.Array | None
  intermediates: PyTree
  saved: list[jax.Array]


@jax.named_scope("pipeline_forward")
def forward(
    pipeline: TracedPipeline, loaded: Arrays, aux: PyTree, inputs: jax.Array, *, save: bool
) -> tuple[jax.Array, PyTree, tuple[Windowed, list[jax.Array]]]:
  """Runs all iterations.

  Args:
    pipeline: the pipeline.
    loaded: weights to fetch from, leaves [R, S, …].
    aux: pytree for `pipeline.aux_at`.
    inputs: [M, microbatch, sequence, embed].
    save: whether to keep the residuals that backward needs.

  Returns:
    (outputs [M, microbatch, sequence, embed], intermediates [T, S, …], (the slot of the last repeat, saved residuals
    [T, S, …])). Backward begins with the weights of that slot.
  """
  iterations, schedule, weights = pipeline.iterations, pipeline.schedule, pipeline.weights

  def iteration(phase: Phase, t: jax.Array | int, carry: tuple[ForwardState, Window]) -> tuple[ForwardState, Window]:
    state, window = carry
    window = weights.ordered(window)
    repeat, piece = iterations.repeat(t), iterations.item(t) % schedule.microbatches
    arriving: Windowed = [None] * len(window)
    if phase.advances:
      following = iterations.repeat(t, after=1)
      if weights.replaces:  # What arrives takes the memory of the repeat before, which has to be done.
        state, following = jax.lax.optimization_barrier((state, following))
      arriving = weights.prefetch(window, loaded, following, piece)
    gathered = weights.at(window, loaded, repeat)
    # Other gathers stop compute. They may as well run while the outputs leave.
    beside = [i for i in weights.gathered_beside_compute(loaded) if arriving[i] is not None]
    early = [arriving[i] for i in beside]
    state, (early, window) = _iteration(pipeline, aux, t, state, gathered, (early, window), save=save)
    for i, each in zip(beside, early, strict=True):
      arriving[i] = each
    if phase.advances:
      window = weights.ordered(weights.place(window, arriving, loaded, repeat, piece))
    return state, window

  window = weights.window(weights.first(loaded), 0, schedule.repeats)
  carry = _initial_state(pipeline, inputs, save=save), window
  for phase in schedule.forward_phases(advances=weights.advances):
    carry = iterations.loop(phase, functools.partial(iteration, phase), carry)
  state, window = carry
  slot = weights.slot(window, iterations.repeat(schedule.iterations))
  outputs = _outputs(pipeline, state)
  if save and weights.has_prefetch_buffers(schedule.repeats):
    # Left to itself, the compiler takes the slot out of the window when backward begins. Until then, and so beside the
    # logits, it keeps both buffers.
    outputs, slot = jax.lax.optimization_barrier((outputs, slot))
  return outputs, state.intermediates, (slot, state.saved)


def _initial_state(pipeline: TracedPipeline, inputs: jax.Array, *, save: bool) -> ForwardState:
  schedule, ring, program = pipeline.schedule, pipeline.ring, pipeline.program
  shift, store = ring.buffers(inputs)

  def per_iteration(aval):
    zeros = ring.constrain_iterations(jax.lax.empty((schedule.iterations, *aval.shape), aval.dtype))
    # Residuals that a remat policy offloads arrive in host memory.
    return zeros if aval.memory_space == jax.memory.Space.Device else jax.device_put(zeros, aval.memory_space)

  return ForwardState(
      shift=shift,
      store=store,
      held=shift if schedule.delay == 2 else None,
      intermediates=jax.tree.map(per_iteration, program.intermediates_avals),
      saved=[per_iteration(aval) for aval in program.saved_avals] if save else [],
  )


def _iteration(
    pipeline: TracedPipeline,
    aux: PyTree,
    t: jax.Array | int,
    state: ForwardState,
    weights: Arrays,
    overlapped: PyTree,
    *,
    save: bool,
) -> tuple[ForwardState, PyTree]:
  """One iteration: (state, `overlapped`, computed while the stages compute, before the outputs leave).

  The compiler schedules a program from its end. It would therefore run operations that are independent of the stages,
  such as a transfer of weights, while the outputs move. A barrier that ties them to the outputs makes the compiler run
  them while the stages compute the outputs. What reads `overlapped` from there on, runs after the stages.
  """
  ring, program = pipeline.ring, pipeline.program
  x, stage_aux = ring.read(t, state.shift, state.store), pipeline.aux_at(aux, t)
  if save:
    y, intermediates, residuals = program.save(weights, stage_aux, x)
  else:
    (y, intermediates), residuals = program.run(weights, stage_aux, x), []
  y, overlapped = jax.lax.optimization_barrier((ring.constrain(y), overlapped))
  leaving, held = (y, None) if state.held is None else (state.held, y)
  shift = ring.rotate(leaving)
  state = ForwardState(
      shift=shift,
      store=ring.write(t, shift, state.store),
      held=held,
      intermediates=jax.tree.map(lambda all_, one: put(all_, one, t), state.intermediates, intermediates),
      saved=[put(all_, one, t) for all_, one in zip(state.saved, residuals, strict=True)],
  )
  return state, overlapped


def _outputs(pipeline: TracedPipeline, state: ForwardState) -> jax.Array:
  ring, store = pipeline.ring, state.store
  if state.held is not None:  # with D = 2 the last output has still to be transferred
    store = ring.write(pipeline.schedule.iterations, ring.rotate(state.held), store)
  return ring.leave(store)


def put(all_: jax.Array, one: jax.Array, t: jax.Array | int) -> jax.Array:
  """Writes iteration t's value into a buffer with a leading iteration axis.

  It is row-major there. Left to itself, the TPU compiler (libtpu 0.0.48.1) may have one order in a loop and another one
  behind it, and copy the values of all iterations in between: 6.3 GB for Qwen3 235B with a window.
  """
  return jax.lax.dynamic_update_index_in_dim(all_, _row_major(one), t, axis=0)


def get(all_: jax.Array, t: jax.Array | int) -> jax.Array:
  """Reads iteration t's value from a buffer with a leading iteration axis."""
  return _row_major(jax.lax.dynamic_index_in_dim(all_, t, axis=0, keepdims=False))


def _row_major(x: jax.Array) -> jax.Array:
  """The same array; one in the host's memory stays as it is."""
  return in_memory(x, range(x.ndim)) if jax.typeof(x).memory_space == jax.memory.Space.Device else x

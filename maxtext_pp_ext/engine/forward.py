# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The forward loops; see `engine.py` for the pseudo-code."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

PyTree = Any


class ForwardState(NamedTuple):
  """What an iteration reads and replaces.

  shift, store: the ring's buffers, see `ring.py`.
  held: with D = 2 the previous iteration's outputs, on their way; None with D = 1. [S, microbatch, sequence, embed].
  intermediates: leaves [T, S, …].
  saved: residuals for backward, leaves [T, S, …]; empty if there is no backward.
  """

  shift: jax.Array
  store: jax.Array
  held: jax.Array | None
  intermediates: PyTree
  saved: list[jax.Array]


def forward(engine, program, loaded: PyTree, aux: PyTree, inputs: jax.Array, *, save: bool):
  """Runs all iterations.

  Args:
    engine: the Engine.
    program: its traced stages.
    loaded: weights to fetch from, leaves [R, S, …].
    aux: pytree for `engine.aux_at`.
    inputs: [M, microbatch, sequence, embed].
    save: whether to keep what backward needs.

  Returns:
    (outputs [M, microbatch, sequence, embed], intermediates [T, S, …], (the slot of the last repeat, saved residuals
    [T, S, …])): backward begins with the weights that forward ended with.
  """
  schedule, weights = engine.schedule, engine.weights

  def run(t, state, slot, overlapped):
    return _iteration(engine, program, aux, t, state, weights.at(slot, loaded, engine.repeat(t)), overlapped, save=save)

  def advancing(t, carry):
    state, window = carry
    item, following = engine.item(t), engine.repeat(t, after=1)
    window = weights.prefetch(window, loaded, following, item % schedule.microbatches)
    state, buffer = run(t, state, window.slot, window.buffer)
    window = window._replace(buffer=buffer)
    return state, weights.advance(window, loaded, following, (item >= 0) & schedule.ends_repeat(item))

  def staying(slot):
    return lambda t, state: run(t, state, slot, None)[0]

  state, window = _initial_state(engine, program, inputs, save=save), weights.window(weights.first(loaded))
  for phase in schedule.forward_phases(advances=weights.has_slots):
    if phase.advances:
      state, window = engine.loop_over_iterations(phase, advancing, (state, window))
    else:
      state = engine.loop_over_iterations(phase, staying(window.slot), state)
  return _outputs(engine, state), state.intermediates, (window.slot, state.saved)


def _initial_state(engine, program, inputs: jax.Array, *, save: bool) -> ForwardState:
  shift, store = engine.ring.buffers(inputs)

  def per_iteration(aval):
    zeros = engine.ring.constrain_iterations(jnp.zeros((engine.schedule.iterations, *aval.shape), aval.dtype))
    # What a remat policy offloads arrives in host memory.
    return zeros if aval.memory_space == jax.memory.Space.Device else jax.device_put(zeros, aval.memory_space)

  return ForwardState(
      shift=shift,
      store=store,
      held=shift if engine.schedule.delay == 2 else None,
      intermediates=jax.tree.map(per_iteration, program.intermediates_avals),
      saved=[per_iteration(aval) for aval in program.saved_avals] if save else [],
  )


def _iteration(engine, program, aux, t, state: ForwardState, weights, overlapped: PyTree, *, save: bool):
  """One iteration: (state, `overlapped`, which has been computed before the outputs leave).

  The compiler's scheduler lays a program out from its end and would have all that is independent of the stages, such as
  a transfer of weights, go on while the outputs move. Tied to the outputs it goes on while they are computed.
  """
  ring = engine.ring
  x, stage_aux = ring.read(t, state.shift, state.store), engine.aux_at(aux, t)
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


def _outputs(engine, state: ForwardState) -> jax.Array:
  store = state.store
  if state.held is not None:  # with D = 2 the last output is still on its way
    store = engine.ring.write(engine.schedule.iterations, engine.ring.rotate(state.held), store)
  return engine.ring.leave(store)


def put(all_: jax.Array, one: jax.Array, t: jax.Array) -> jax.Array:
  """Writes iteration t's value into a buffer with a leading iteration axis."""
  return jax.lax.dynamic_update_index_in_dim(all_, one, t, axis=0)


def get(all_: jax.Array, t: jax.Array) -> jax.Array:
  """Reads iteration t's value from a buffer with a leading iteration axis."""
  return jax.lax.dynamic_index_in_dim(all_, t, axis=0, keepdims=False)

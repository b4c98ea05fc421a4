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
    (outputs [M, microbatch, sequence, embed], intermediates [T, S, …], (the last repeat's weights, saved residuals
    [T, S, …])): backward begins with the weights that forward ended with.
  """
  schedule, weights = engine.schedule, engine.weights
  mixed = schedule.bubble_iterations
  run = lambda *args, **kwargs: _iterations(engine, program, aux, *args, save=save, **kwargs)

  state = _initial_state(engine, program, inputs, save=save)
  slot = weights.fetch(loaded, 0)
  if schedule.repeats == 1:
    state = run(state, 0, schedule.iterations, lambda t: weights.use(slot), bubbles=True)
  else:
    state = run(state, 0, mixed, lambda t: weights.use(slot), bubbles=True)

    def window(r, carry):
      state, slot = carry
      following = weights.fetch(loaded, r + 1)
      start = r * schedule.microbatches
      end = start + schedule.microbatches
      state = run(state, start + mixed, schedule.microbatches - mixed, lambda t: weights.use(slot), bubbles=False)
      choose = lambda t: weights.select(_uses_current(schedule, t - end), weights.use(following), weights.use(slot))
      state = run(state, end, mixed, choose, bubbles=False)
      return state, following

    state, slot = engine.loop_over_repeats(window, schedule.repeats - 1, (state, slot))
    last = (schedule.repeats - 1) * schedule.microbatches + mixed
    state = run(state, last, schedule.microbatches, lambda t: weights.use(slot), bubbles=True)
  return _outputs(engine, state), state.intermediates, (slot, state.saved)


def _initial_state(engine, program, inputs: jax.Array, *, save: bool) -> ForwardState:
  shift, store = engine.ring.buffers(inputs)

  def per_iteration(aval):
    buffer = engine.ring.constrain_iterations(jnp.zeros((engine.schedule.iterations, *aval.shape), aval.dtype))
    # What a remat policy offloads arrives in host memory.
    return buffer if aval.memory_space == jax.memory.Space.Device else jax.device_put(buffer, aval.memory_space)

  return ForwardState(
      shift=shift,
      store=store,
      held=shift if engine.schedule.delay == 2 else None,
      intermediates=jax.tree.map(per_iteration, program.intermediates_avals),
      saved=[per_iteration(aval) for aval in program.saved_avals] if save else [],
  )


def _iterations(engine, program, aux, state, first, count, weights_at, *, save: bool, bubbles: bool) -> ForwardState:
  """Runs `count` iterations from `first` on; `weights_at(t)` gives the stages' weights."""
  ring = engine.ring

  def iteration(t, state):
    x = ring.read(t, state.shift, state.store, bubbles=bubbles)
    weights, stage_aux = weights_at(t), engine.aux_at(aux, t)
    if save:
      y, intermediates, residuals = program.save(weights, stage_aux, x)
    else:
      (y, intermediates), residuals = program.run(weights, stage_aux, x), []
    y = ring.constrain(y)
    leaving, held = (y, None) if state.held is None else (state.held, y)
    shift = ring.rotate(leaving)
    return ForwardState(
        shift=shift,
        store=ring.write(t, shift, state.store),
        held=held,
        intermediates=jax.tree.map(lambda all_, one: put(all_, one, t), state.intermediates, intermediates),
        saved=[put(all_, one, t) for all_, one in zip(state.saved, residuals, strict=True)],
    )

  return engine.loop_over_iterations(iteration, first, count, state)


def _outputs(engine, state: ForwardState) -> jax.Array:
  store = state.store
  if state.held is not None:  # with D = 2 the last output is still on its way
    store = engine.ring.write(engine.schedule.iterations, engine.ring.rotate(state.held), store)
  return engine.ring.leave(store)


def _uses_current(schedule, offset: jax.Array) -> jax.Array:
  """Bool [S]: which stages use the window's own repeat at this offset."""
  return schedule.uses_current(offset, jnp.arange(schedule.stages, dtype=jnp.int32))


def put(all_: jax.Array, one: jax.Array, t: jax.Array) -> jax.Array:
  """Writes iteration t's value into a buffer with a leading iteration axis."""
  return jax.lax.dynamic_update_index_in_dim(all_, one, t, axis=0)


def get(all_: jax.Array, t: jax.Array) -> jax.Array:
  """Reads iteration t's value from a buffer with a leading iteration axis."""
  return jax.lax.dynamic_index_in_dim(all_, t, axis=0, keepdims=False)

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The backward loops; see `engine.py` for the pseudo-code."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from maxtext_pp_ext.engine.forward import _uses_current, get

PyTree = Any


class BackwardState(NamedTuple):
  """Cotangents of the forward state's activations, and what backward fills.

  dshift, dstore: as `ring.py` lays shift and store out.
  dheld: with D = 2 the cotangent of the outputs that the forward held back; None with D = 1.
  """

  dshift: jax.Array
  dstore: jax.Array
  dheld: jax.Array | None


def backward(engine, program, loaded, slot, params, aux, saved, doutputs: jax.Array, dintermediates: PyTree):
  """Runs all iterations in reverse.

  Args:
    engine: the Engine.
    program: its traced stages.
    loaded: weights to fetch from, leaves [R, S, …].
    slot: the last repeat's weights, which forward had fetched last.
    params: the parameters, for the types of their gradients.
    aux: pytree for `engine.aux_at`.
    saved: what forward kept, leaves [T, S, …].
    doutputs: cotangent of the outputs [M, microbatch, sequence, embed].
    dintermediates: cotangents of the intermediates, leaves [T, S, …].

  Returns:
    (dparams [R, S, …] in the parameters' dtypes and stored layout, dinputs [M, microbatch, sequence, embed]).
  """
  schedule, weights = engine.schedule, engine.weights
  mixed = schedule.bubble_iterations
  step = lambda *args: _step(engine, program, aux, saved, dintermediates, *args)

  def single(state, total, first, count, slot, *, bubbles):
    """Iterations that use one slot; adds to the gradient of that slot."""

    def iteration(t, carry):
      state, total = carry
      state, gradient = step(state, t, weights.use(slot), bubbles)
      return state, weights.accumulate(total, gradient, ~_bubbles(schedule, t) if bubbles else None)

    return engine.loop_over_iterations(iteration, first, count, (state, total), reverse=True)

  def double(state, total, first, current, previous):
    """Offsets mixed − 1 … −1 of the window that begins at `first`: each stage goes from its current slot to the previous.

    A stage that does so has no more to add to the current slot's gradient. That moves out of the accumulators, and the
    stage goes on with the previous slot's gradient in its place: two repeats, one accumulator. Stage 0 does so after
    offset 0, so one iteration more is included: what a loop carries can change in place.

    Args:
      total: accumulators of the current slot's gradient [F, S, …].

    Returns:
      (state, accumulators of the previous slot's gradient, sums of the current slot's gradient).
    """

    def iteration(t, carry):
      state, total, done = carry
      is_current, was_current = _uses_current(schedule, t - first), _uses_current(schedule, t - first + 1)
      total, done = weights.flush(total, done, was_current & ~is_current)
      chosen = weights.select(is_current, weights.use(current), weights.use(previous))
      state, gradient = step(state, t, chosen, False)
      return state, weights.accumulate(total, gradient), done

    carry = (state, total, weights.no_sums(total))
    return engine.loop_over_iterations(iteration, first - 1, mixed + 1, carry, reverse=True)

  state = _initial_state(engine, doutputs)
  dparams = weights.empty_gradient(params)
  total = weights.zero_gradient(slot)
  if schedule.repeats == 1:
    state, total = single(state, total, 0, schedule.iterations, slot, bubbles=True)
  else:
    last = (schedule.repeats - 1) * schedule.microbatches + mixed
    state, total = single(state, total, last, schedule.microbatches, slot, bubbles=True)

    def window(r, carry):
      state, slot, total, dparams = carry
      previous = weights.fetch(loaded, r)
      start = r * schedule.microbatches
      end = start + schedule.microbatches
      state, total, done = double(state, total, end, slot, previous)
      # The barrier has the reduction done, and its operand free, before the iterations that follow.
      state, total, reduced = jax.lax.optimization_barrier((state, total, weights.reduce(done)))
      dparams = weights.write_gradient(dparams, r + 1, reduced)
      steady = schedule.microbatches - mixed - 1
      state, total = single(state, total, start + mixed, steady, previous, bubbles=False)
      return state, previous, total, dparams

    carry = (state, slot, total, dparams)
    state, slot, total, dparams = engine.loop_over_repeats(window, schedule.repeats - 1, carry, reverse=True)
    state, total = single(state, total, 0, mixed, slot, bubbles=True)
  return weights.write_gradient(dparams, 0, weights.reduce(total)), engine.ring.leave(state.dstore)


def _initial_state(engine, doutputs: jax.Array) -> BackwardState:
  ring, schedule = engine.ring, engine.schedule
  dshift, dstore = ring.buffers(doutputs)
  if schedule.delay == 1:
    return BackwardState(dshift, dstore, None)
  # The transpose of the forward's last transfer, which has no iteration of its own.
  return BackwardState(dshift, dstore, ring.rotate_back(ring.write_back(schedule.iterations, dshift, dstore)))


def _step(engine, program, aux, saved, dintermediates, state, t, weights, bubbles: bool):
  """One iteration in reverse: (state, gradient of the stages' weights [F, S, …])."""
  ring = engine.ring
  dleaving = ring.rotate_back(ring.write_back(t, state.dshift, state.dstore))
  dy, dheld = (dleaving, None) if state.dheld is None else (state.dheld, dleaving)
  if bubbles:
    dy = jnp.where(ring.is_bubble(t, dy.ndim), jnp.zeros_like(dy), dy)
  gradient, dx = program.backward(
      weights,
      engine.aux_at(aux, t),
      [get(all_, t) for all_ in saved],
      ring.constrain(dy),
      jax.tree.map(lambda all_: _cotangent_at(all_, t), dintermediates),
  )
  dshift, dstore = ring.read_back(t, ring.constrain(dx), state.dstore, bubbles=bubbles)
  return BackwardState(dshift, dstore, dheld), gradient


def _cotangent_at(all_: jax.Array, t: jax.Array) -> jax.Array:
  return all_[0] if all_.dtype == jax.dtypes.float0 else get(all_, t)


def _bubbles(schedule, t: jax.Array) -> jax.Array:
  """Bool [S]: which stages have nothing to do at iteration t."""
  return schedule.is_bubble(t, jnp.arange(schedule.stages, dtype=jnp.int32))

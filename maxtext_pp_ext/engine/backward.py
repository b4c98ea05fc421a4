# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The backward loops; see `engine.py` for the pseudo-code."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from maxtext_pp_ext.engine.forward import _uses_current, get
from maxtext_pp_ext.engine.stage import zero_cotangents

PyTree = Any


class BackwardState(NamedTuple):
  """Cotangents of the forward state's activations, and what backward fills.

  dshift, dstore: as `ring.py` lays shift and store out.
  dheld: with D = 2 the cotangent of the outputs that the forward held back; None with D = 1.
  """

  dshift: jax.Array
  dstore: jax.Array
  dheld: jax.Array | None


def backward(engine, program, loaded, params, aux, saved, doutputs: jax.Array, dintermediates: PyTree):
  """Runs all iterations in reverse.

  Args:
    engine: the Engine.
    program: its traced stages.
    loaded: weights to fetch from, leaves [R, S, …].
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

  def single(state, first, count, slot, *, bubbles):
    """Iterations that use one slot: (state, its gradient)."""

    def iteration(t, carry):
      state, total = carry
      state, gradient = step(state, t, weights.use(slot), bubbles)
      where = ~_bubbles(schedule, t) if bubbles else None
      return state, weights.accumulate(total, gradient, where)

    return engine.loop_over_iterations(iteration, first, count, (state, weights.zero_gradient(slot)), reverse=True)

  def double(state, first, count, current, previous):
    """Iterations that use two slots: (state, gradient of the current one, of the previous one)."""

    def iteration(t, carry):
      state, dcurrent, dprevious = carry
      is_current = _uses_current(schedule, t - first)
      chosen = weights.select(is_current, weights.use(current), weights.use(previous))
      state, gradient = step(state, t, chosen, False)
      return state, weights.accumulate(dcurrent, gradient, is_current), weights.accumulate(dprevious, gradient, ~is_current)

    zeros = weights.zero_gradient(current), weights.zero_gradient(previous)
    return engine.loop_over_iterations(iteration, first, count, (state, *zeros), reverse=True)

  state = _initial_state(engine, doutputs)
  slot = weights.fetch(loaded, schedule.repeats - 1)
  if schedule.repeats == 1:
    state, total = single(state, 0, schedule.iterations, slot, bubbles=True)
    dparams = weights.write_gradient(weights.empty_gradient(params), 0, weights.reduce(total))
  else:
    last = (schedule.repeats - 1) * schedule.microbatches + mixed
    state, total = single(state, last, schedule.microbatches, slot, bubbles=True)
    dparams, pending = weights.empty_gradient(params), weights.reduce(total)

    def window(r, carry):
      state, slot, dparams, pending = carry
      previous = weights.fetch(loaded, r)
      start = r * schedule.microbatches
      end = start + schedule.microbatches
      state, dslot, dmixed = double(state, end, mixed, slot, previous)
      dparams = weights.write_gradient(dparams, r + 1, weights.add(pending, weights.reduce(dslot)))
      state, dsteady = single(state, start + mixed, schedule.microbatches - mixed, previous, bubbles=False)
      # Merged before the reduction: two loops' partial sums, one reduce-scatter.
      return state, previous, dparams, weights.reduce(weights.add(dmixed, dsteady))

    carry = (state, slot, dparams, pending)
    state, slot, dparams, pending = engine.loop_over_repeats(window, schedule.repeats - 1, carry, reverse=True)
    state, total = single(state, 0, mixed, slot, bubbles=True)
    dparams = weights.write_gradient(dparams, 0, weights.add(pending, weights.reduce(total)))
  return dparams, engine.ring.leave(state.dstore)


def _initial_state(engine, doutputs: jax.Array) -> BackwardState:
  ring, schedule = engine.ring, engine.schedule
  dshift, dstore = ring.buffers(doutputs)
  if schedule.delay == 1:
    return BackwardState(dshift, dstore, None)
  # The transpose of the forward's last transfer, which has no iteration of its own.
  return BackwardState(dshift, dstore, ring.rotate_back(ring.write_back(schedule.iterations, dshift, dstore)))


def _step(engine, program, aux, saved, dintermediates, state, t, weights, bubbles: bool):
  """One iteration in reverse: (state, gradient of the stages' weights [S, …])."""
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
      _intermediate_cotangents(program, dintermediates, t),
  )
  dshift, dstore = ring.read_back(t, ring.constrain(dx), state.dstore, bubbles=bubbles)
  return BackwardState(dshift, dstore, dheld), gradient


def _intermediate_cotangents(program, dintermediates: PyTree, t: jax.Array) -> PyTree:
  zeros = zero_cotangents(program.intermediates_avals)
  is_float0 = lambda d: d.dtype == jax.dtypes.float0
  return jax.tree.map(lambda all_, zero: zero if is_float0(all_) else get(all_, t), dintermediates, zeros)


def _bubbles(schedule, t: jax.Array) -> jax.Array:
  """Bool [S]: which stages have nothing to do at iteration t."""
  return schedule.is_bubble(t, jnp.arange(schedule.stages, dtype=jnp.int32))

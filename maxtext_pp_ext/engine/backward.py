# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The backward loops; see `engine.py` for the pseudo-code."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from maxtext_pp_ext.engine.forward import get

PyTree = Any


class BackwardState(NamedTuple):
  """Cotangents of the forward state's activations.

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
  gradients = engine.gradients(program, params)

  def iteration(phase, t, carry):
    state, window, sums = carry
    item, repeat, before = engine.item(t), engine.repeat(t), engine.repeat(t, after=-1)
    piece = schedule.microbatches - 1 - item % schedule.microbatches
    dleaving = engine.ring.rotate_back(engine.ring.write_back(t, state.dshift, state.dstore))
    if phase.reduces:
      sums = gradients.reduce(sums, window.buffer, engine.repeat(t, after=1), piece)
    if phase.advances:
      # What is reduced goes on while the forward is computed again and the cotangents arrive; what is gathered goes on
      # from there until each weight's own gradient is computed. Left alone, both would go on at the same time.
      dleaving, piece = jax.lax.optimization_barrier((dleaving, piece))
      window = weights.prefetch(window, loaded, before, piece)
    slot = weights.at(window.slot, loaded, repeat)
    state, gradient, buffer = _iteration(
        engine, program, aux, saved, dintermediates, t, state, dleaving, slot, window.buffer
    )
    window = window._replace(buffer=buffer)
    works = ~schedule.is_bubble(t, engine.stage_numbers)
    sums = gradients.add(sums, gradient, repeat, works, works & schedule.ends_repeat(item))
    if phase.advances:
      finishes = works & schedule.begins_repeat(item) & (item > 0)
      window = weights.advance(window, loaded, before, finishes)
      sums, buffer = gradients.finish_repeat(sums, window.buffer, finishes)
      window = window._replace(buffer=buffer)
    return state, window, sums

  carry = _initial_state(engine, doutputs), weights.window(slot), gradients.zeros()
  advances = weights.has_slots or gradients.any_partial
  for phase in schedule.backward_phases(advances=advances, reduces=gradients.any_partial):
    carry = engine.loop_over_iterations(phase, functools.partial(iteration, phase), carry, reverse=True)
  state, _, sums = carry
  return gradients.finish(sums), engine.ring.leave(state.dstore)


def _initial_state(engine, doutputs: jax.Array) -> BackwardState:
  ring, schedule = engine.ring, engine.schedule
  dshift, dstore = ring.buffers(doutputs)
  if schedule.delay == 1:
    return BackwardState(dshift, dstore, None)
  # The transpose of the forward's last transfer, which has no iteration of its own.
  return BackwardState(dshift, dstore, ring.rotate_back(ring.write_back(schedule.iterations, dshift, dstore)))


def _iteration(engine, program, aux, saved, dintermediates, t, state, dleaving, slot, overlapped):
  """One iteration in reverse, from the cotangent of what leaves the stages at its end.

  Returns:
    (state, gradients of the stages' weights [F, S, …], `overlapped`, each computed before its weight's gradient).
  """
  ring = engine.ring
  dy, dheld = (dleaving, None) if state.dheld is None else (state.dheld, dleaving)
  dy = jnp.where(ring.is_bubble(t, dy.ndim), jnp.zeros_like(dy), dy)
  gradient, dx, overlapped = program.backward(
      slot,
      engine.aux_at(aux, t),
      [get(all_, t) for all_ in saved],
      ring.constrain(dy),
      jax.tree.map(lambda all_: _cotangent_at(all_, t), dintermediates),
      overlapped,
  )
  dshift, dstore = ring.read_back(t, ring.constrain(dx), state.dstore)
  return BackwardState(dshift, dstore, dheld), gradient, overlapped


def _cotangent_at(all_: jax.Array, t: jax.Array) -> jax.Array:
  return all_[0] if all_.dtype == jax.dtypes.float0 else get(all_, t)

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The backward loops; see `engine.py` for the pseudo-code."""

from __future__ import annotations

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from maxtext_pp_ext.engine.forward import get
from maxtext_pp_ext.engine.gradients import Gradients
from maxtext_pp_ext.engine.programs.partial import Saved, Summand
from maxtext_pp_ext.engine.sums import Added, Item, Sums
from maxtext_pp_ext.engine.traced import Residuals, TracedPipeline
from maxtext_pp_ext.engine.weights import Arrays, Window, Windowed
from maxtext_pp_ext.schedule import Phase

PyTree = Any


class BackwardState(NamedTuple):
  """Cotangents of the forward state's activations.

  Attributes:
    dx: of the stages' inputs, [S, microbatch, sequence, embed]; in bubbles any value, NaN included.
    dstore: laid out like store in `ring.py`, [S, M, microbatch, sequence, embed].
    dheld: with D = 2 the cotangent of the outputs that forward held back, laid out like dx; None with D = 1.
  """

  dx: jax.Array
  dstore: jax.Array
  dheld: jax.Array | None


Carry = tuple[BackwardState, Window, Sums]


@jax.named_scope("pipeline_backward")
def backward(
    pipeline: TracedPipeline, kept: Residuals, doutputs: jax.Array, dintermediates: PyTree
) -> tuple[Arrays, jax.Array]:
  """Runs all iterations in reverse.

  Args:
    pipeline: the pipeline.
    kept: the residuals that forward kept.
    doutputs: cotangent of the outputs [M, microbatch, sequence, embed].
    dintermediates: cotangents of the intermediates, leaves [T, S, …].

  Returns:
    (dparams [R, S, …] in the parameters' dtypes and stored layout, dinputs [M, microbatch, sequence, embed]).
  """
  iterations, schedule, ring, weights = pipeline.iterations, pipeline.schedule, pipeline.ring, pipeline.weights
  gradients = pipeline.gradients(kept.params)
  apart = pipeline.program.gradients.gathers_after is not None  # with one microbatch only

  def iteration(phase: Phase, t: jax.Array | int, carry: Carry) -> Carry:
    state, window, sums = carry
    window = weights.ordered(window)
    if weights.replaces:  # Reductions do not begin before the iteration.
      state, sums = jax.lax.optimization_barrier((state, sums))
    item, repeat, before = iterations.item(t), iterations.repeat(t), iterations.repeat(t, after=-1)
    piece = schedule.microbatches - 1 - item % schedule.microbatches
    dleaving = ring.rotate_back(ring.write_back(t, state.dx, state.dstore))
    if phase.reduces:
      sums, window = gradients.reduce(sums, window, repeat, iterations.repeat(t, after=1), piece)
      if weights.replaces:
        # A gradient takes the memory of the one before, which is reduced first. This barrier is for the gradients that
        # come first, and for those whose reductions run beside nothing. Those of the others have until `overlapped`.
        early = {i: sums.stored[i] for i in {*pipeline.program.gradients.early, *gradients.reduced_beside_nothing}}
        dleaving, early = jax.lax.optimization_barrier((dleaving, early))
        sums = sums._replace(stored=[early.get(i, each) for i, each in enumerate(sums.stored)])
    arriving: Windowed = [None] * len(window)
    if phase.advances:
      # The barrier separates two transfers that would otherwise run at the same time. The reduction runs while the
      # forward is recomputed and the cotangents arrive; the gather follows, until each weight's own gradient is computed.
      # With one microbatch each reduction has until then, and the gathers have until the iteration's end. If weights are
      # gathered in steps, reductions have until the middle of the iteration, and the gathers begin there.
      dleaving, piece, before = jax.lax.optimization_barrier((dleaving, piece, before))
      if not apart:
        arriving = weights.prefetch(window, kept.loaded, before, piece)
    gathered = weights.at(window, kept.loaded, repeat)
    works = ~schedule.is_bubble(t, iterations.stage_numbers)
    finishes = works & schedule.begins_repeat(item) & (item > 0) if phase.advances else None
    of_sums = Item(repeat=repeat, works=works, first=works & schedule.ends_repeat(item), finishes=finishes)
    place = lambda number, arrived, waiting: weights.place_one(number, arrived, waiting, kept.loaded, repeat, piece)
    add, placed = _adding(gradients, gradients.adder(sums, window, of_sums), place)
    # What has to be done before a weight's gradient is computed. With one microbatch gathers have until the end.
    overlapped = list(zip(sums.stored, [None] * len(arriving) if weights.replaces else arriving, strict=True))
    state, gradient, overlapped, (before, piece) = _iteration(
        pipeline, kept, dintermediates, t, state, dleaving, gathered, overlapped, add, (before, piece)
    )
    if phase.advances and apart:  # Earlier, they would share the links with reductions, and delay the longest of them.
      arriving = weights.prefetch(window, kept.loaded, before, piece)
    sums = sums._replace(stored=[stored for stored, _ in overlapped])
    if not weights.replaces:
      arriving = [piece for _, piece in overlapped]
    sums, window = gradients.add(sums, window, gradient, of_sums)
    window = weights.ordered(window)
    # What else changes the window comes after the stages, which read it.
    state, window = jax.lax.optimization_barrier((state, window))
    if finishes is not None:
      arriving = [None if i in placed else each for i, each in enumerate(arriving)]
      window = weights.ordered(weights.place(window, arriving, kept.loaded, repeat, piece))
      sums, window = gradients.finish_repeat(sums, window, repeat, finishes)
    return state, window, sums

  window = weights.window(kept.slot, schedule.repeats - 1, schedule.repeats)
  carry = _initial_state(pipeline, doutputs), window, gradients.zeros()
  advances = weights.advances or gradients.any_partial
  for phase in schedule.backward_phases(advances=advances, reduces=gradients.any_partial):
    carry = iterations.loop(phase, functools.partial(iteration, phase), carry, reverse=True)
  state, _, sums = carry
  return gradients.finish(sums), ring.leave(state.dstore)


def _adding(
    gradients: Gradients,
    add_up: Callable[[int, Summand], Added],
    place: Callable[[int, jax.Array, jax.Array], jax.Array],
) -> tuple[Callable[[int, Summand], Added], set[int]]:
  """(what adds a summand, the numbers of the weights whose arriving pieces it has put into the window so far).

  After the last summand of an iteration nothing reads a weight any more. So its piece takes its place, and needs no
  memory of its own until the iteration's end. Pieces of weights whose sums do not wait in the window are left out.

  Args:
    gradients: the gradients.
    add_up: adds a summand (`Gradients.adder`). The summand has come after (its stored gradients, the arriving piece).
    place: (number of a weight, its arriving piece, its window with finished sums) -> the window with the piece.
  """
  placed: set[int] = set()

  def add(number: int, summand: Summand) -> Added:
    added = add_up(number, summand)
    _, arrived = summand.overlapped
    if added.waiting is None or arrived is None or not gradients.in_window[number]:
      return added
    placed.add(number)
    return added._replace(waiting=place(number, arrived, added.waiting))

  return add, placed


def _initial_state(pipeline: TracedPipeline, doutputs: jax.Array) -> BackwardState:
  ring, schedule = pipeline.ring, pipeline.schedule
  dx, dstore = ring.buffers(doutputs)  # no stage reads after the last iteration: dx may be anything
  if schedule.delay == 1:
    return BackwardState(dx, dstore, None)
  # The transpose of the forward's last transfer, which has no iteration of its own.
  return BackwardState(dx, dstore, ring.rotate_back(ring.write_back(schedule.iterations, dx, dstore)))


def _iteration(
    pipeline: TracedPipeline,
    kept: Residuals,
    dintermediates: PyTree,
    t: jax.Array | int,
    state: BackwardState,
    dleaving: jax.Array,
    weights: Arrays,
    overlapped: list[Any],
    add: Callable[[int, Summand], Added],
    behind: PyTree,
) -> tuple[BackwardState, list[Any], list[Any], PyTree]:
  """One iteration in reverse, from the cotangent of the activations that leave the stages at its end.

  Args:
    pipeline: the pipeline.
    kept: the residuals that forward kept.
    dintermediates: cotangents of the intermediates, leaves [T, S, …].
    t: iteration.
    state: cotangents after the iteration.
    dleaving: cotangent of the activations that leave the stages, [S, microbatch, sequence, embed].
    weights: the stages' weights, leaves [S, …].
    overlapped: for each weight, arrays or None, to be computed before its gradient.
    add: adds a gradient that is a partial sum to its sum (`_adding`).
    behind: arrays to be computed behind the reductions, where gathers are kept apart from them (`GradientProgram`).

  Returns:
    (state, for each weight its sum or its gradient, [F, S, …], `overlapped`, each computed before its weight's gradient,
    `behind`).
  """
  ring = pipeline.ring
  dy, dheld = (dleaving, None) if state.dheld is None else (state.dheld, dleaving)
  gradient, dx, overlapped, behind = pipeline.program.backward(
      weights,
      pipeline.aux_at(kept.aux, t),
      [Saved(functools.partial(get, all_), jnp.asarray(t)) for all_ in kept.saved],
      ring.constrain(dy),
      jax.tree.map(lambda all_: _cotangent_at(all_, t), dintermediates),
      overlapped,
      add,
      behind,
  )
  dx = ring.constrain(dx)
  return BackwardState(dx, ring.read_back(t, dx, state.dstore), dheld), gradient, overlapped, behind


def _cotangent_at(all_: jax.Array, t: jax.Array | int) -> jax.Array:
  return all_[0] if all_.dtype == jax.dtypes.float0 else get(all_, t)

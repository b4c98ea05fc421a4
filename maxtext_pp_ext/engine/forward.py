# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The forward loops; see `engine.py` for the pseudo-code."""

import functools
from typing import Any, NamedTuple

import jax

from maxtext_pp_ext.engine.residuals import empty, put
from maxtext_pp_ext.engine.shapes import AtStages, Microbatches, PerIteration, Store
from maxtext_pp_ext.engine.traced import TracedPipeline
from maxtext_pp_ext.engine.weights import of_all
from maxtext_pp_ext.engine.weights.weight import Weight
from maxtext_pp_ext.schedule import Phase

PyTree = Any


class ForwardState(NamedTuple):
  """The state that an iteration reads and replaces."""

  store: Store  # the ring's store, see `ring.py`
  held: AtStages | None  # with D = 2 the previous iteration's outputs, still in transfer; None with D = 1
  intermediates: PyTree  # what stages sow in each iteration
  # residuals for backward, for each the buffer of each turn (`Iterations.turns`); empty if there is no backward
  saved: list[list[PerIteration]]


Carry = tuple[ForwardState, of_all.Carried]


@jax.named_scope("pipeline_forward")
def forward(
    pipeline: TracedPipeline, loaded: list[Weight], aux: PyTree, inputs: Microbatches, *, save: bool
) -> tuple[Microbatches, PyTree, tuple[list[Weight], list[list[PerIteration]]]]:
  """Runs all iterations.

  Args:
    pipeline: the pipeline.
    loaded: the weights with their sources.
    aux: pytree for `pipeline.aux_at`.
    inputs: the microbatches.
    save: whether to keep the residuals that backward needs.

  Returns:
    (outputs, intermediates [T, S, …], (the weights with the last repeat as the current one, saved residuals)).
  """
  iterations, schedule = pipeline.iterations, pipeline.schedule
  with jax.named_scope("gather"):
    first = [w.first() for w in loaded]
  carry = _initial_state(pipeline, inputs, save=save), of_all.carried([w.open(0) for w in first])
  body = functools.partial(_iteration, pipeline, loaded, aux, save)
  for phase in schedule.forward_phases(advances=pipeline.gathers):
    carry = iterations.loop(phase, functools.partial(body, phase), carry)
  state, carried = carry
  ring, store = pipeline.ring, state.store
  if state.held is not None:  # with D = 2 the last output has still to be transferred
    store = ring.write(schedule.iterations, ring.rotate(state.held), store)
  outputs = ring.leave(store)
  weights = list(loaded)
  if save:
    weights = of_all.close(of_all.in_iteration(carried, loaded), iterations.repeat(schedule.iterations))
    if any(w.has_next_buffer for w in weights):
      # Left to itself, the compiler takes the current repeat out of the buffers when backward begins. Until then, and so
      # beside the logits, it keeps both buffers.
      weights, outputs = of_all.behind_barrier(weights, ["current"], outputs)
  return outputs, state.intermediates, (weights, state.saved)


def _initial_state(pipeline: TracedPipeline, inputs: Microbatches, *, save: bool) -> ForwardState:
  schedule, ring, program = pipeline.schedule, pipeline.ring, pipeline.program
  store = ring.enter(inputs)
  return ForwardState(
      store=store,
      held=ring.read(0, store) if schedule.delay == 2 else None,
      intermediates=jax.tree.map(lambda aval: empty(ring, aval, schedule.iterations), program.intermediates_avals),
      saved=pipeline.residuals.empty() if save else [],
  )


def _iteration(
    pipeline: TracedPipeline,
    loaded: list[Weight],
    aux: PyTree,
    save: bool,
    phase: Phase,
    t: jax.Array | int,
    turn: int,
    carry: Carry,
) -> Carry:
  """One iteration: while the stages compute, the next repeat's chunk arrives."""
  iterations, schedule, ring = pipeline.iterations, pipeline.schedule, pipeline.ring
  state, carried = carry
  weights = of_all.ordered(of_all.in_iteration(carried, loaded))
  repeat, chunk = iterations.repeat(t), iterations.item(t) % schedule.microbatches
  if phase.advances:
    following = iterations.repeat(t, after=1)
    if any(w.replaces for w in weights):  # What arrives takes the memory of the repeat before, which has to be done.
      state, following = jax.lax.optimization_barrier((state, following))
    weights = of_all.gather(weights, following, chunk)
  used = of_all.use(weights, repeat)
  x, stage_aux = ring.read(t, state.store), pipeline.aux_at(aux, t)
  y, intermediates, residuals = pipeline.program.run(used, stage_aux, x, save=save)
  # The compiler schedules a program from its end. It would therefore run operations that are independent of the stages,
  # such as gathers, while the outputs move. A barrier that ties them to the outputs makes the compiler run them while the
  # stages compute the outputs. Gathers that stop compute are not tied: they may as well run while the outputs leave.
  weights, y = of_all.behind_barrier(weights, _overlapped, ring.constrain(y))
  leaving, held = (y, None) if state.held is None else (state.held, y)
  state = ForwardState(
      store=ring.write(t, ring.rotate(leaving), state.store),
      held=held,
      intermediates=jax.tree.map(
          lambda all_, one: put(ring, all_, one, t, range(one.ndim)), state.intermediates, intermediates
      ),
      saved=pipeline.residuals.put(state.saved, residuals, t, turn),
  )
  if phase.advances:
    weights = of_all.ordered(of_all.place(weights, repeat, chunk))
  return state, of_all.carried(weights)


def _overlapped(weight: Weight) -> list[str]:
  """The arrays of a weight that are computed before the stages' outputs leave."""
  return ["buffers", "arriving"] if weight.is_gather_overlapped else ["buffers"]

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The forward loops; see `engine.py` for the pseudo-code."""

import functools
from typing import Any, NamedTuple

import jax

from maxtext_pp_ext.engine import host_memory
from maxtext_pp_ext.engine.buffers import buffer, get, put
from maxtext_pp_ext.engine.per_stage import OnDevices
from maxtext_pp_ext.engine.programs.stage import StageProgram
from maxtext_pp_ext.engine.shapes import AtStages, Microbatches, PerIteration, Residual, Store
from maxtext_pp_ext.engine.traced import Part, SavedOfParts, TracedPipeline
from maxtext_pp_ext.engine.weights import of_all
from maxtext_pp_ext.engine.weights.weight import Weight
from maxtext_pp_ext.schedule import Phase

PyTree = Any


class ForwardState(NamedTuple):
  """The state that an iteration reads and replaces."""

  store: Store  # the ring's store, see `ring.py`
  held: AtStages | None  # with D = 2 the previous iteration's outputs, still in transfer; None with D = 1
  intermediates: PyTree  # what stages sow in each iteration
  # residuals of this part of the iterations for backward, for each the buffer of each turn; none if there is no backward
  saved: list[list[PerIteration]]
  # of the residuals that go to the host's memory those of the iteration before, not yet sent; None for others
  to_send: list[Residual | None]


Carry = tuple[ForwardState, of_all.Carried]


@jax.named_scope("pipeline_forward")
def forward(
    pipeline: TracedPipeline, loaded: list[Weight], aux: PyTree, inputs: Microbatches, *, save: bool
) -> tuple[Microbatches, PyTree, tuple[list[Weight], SavedOfParts]]:
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
  carry = _initial_state(pipeline, inputs), of_all.carried([w.open(0) for w in first])
  saved: SavedOfParts = []
  body = functools.partial(_iteration, pipeline, loaded, aux, save)
  phases = schedule.forward_phases(advances=pipeline.gathers)
  for phase, number in pipeline.in_parts(phases) if save else ((phase, 0) for phase in phases):
    state, carried = carry
    if save and number == len(saved):  # loops carry the residuals of their own part only
      part = pipeline.parts[number]
      saved.append(_buffers(pipeline, part))
      state = state._replace(to_send=host_memory.nothing_to_send(pipeline, part))
    carry = state._replace(saved=saved[number] if save else []), carried
    sends = any(one is not None for one in carry[0].to_send)
    carry = iterations.loop(phase, functools.partial(body, phase, number), carry, in_pairs=sends)
    saved[number : number + 1] = [carry[0].saved]
    if save and phase.first + phase.count > pipeline.parts[number].last:
      behind = pipeline.parts[number].last + 1
      saved[number] = host_memory.sent(
          pipeline, number, carry[0].saved, carry[0].to_send, behind, behind % iterations.turns
      )
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
  return outputs, state.intermediates, (weights, saved)


def _initial_state(pipeline: TracedPipeline, inputs: Microbatches) -> ForwardState:
  schedule, ring = pipeline.schedule, pipeline.ring
  store, held = ring.enter(inputs)
  return ForwardState(
      store=store,
      held=held,
      intermediates=jax.tree.map(
          lambda aval: buffer(pipeline.ring, aval, schedule.iterations), pipeline.parts[0].program.intermediates_avals
      ),
      saved=[],
      to_send=[],
  )


def _buffers(pipeline: TracedPipeline, part: Part) -> list[list[PerIteration]]:
  """Buffers for the residuals of a part; for each, that of each turn."""
  places = part.places(pipeline.iterations.turns)
  return [[buffer(pipeline.ring, aval, count) for count in places] for aval in part.program.saved_avals]


def _iteration(
    pipeline: TracedPipeline,
    loaded: list[Weight],
    aux: PyTree,
    save: bool,
    phase: Phase,
    number: int,
    t: jax.Array | int,
    turn: int,
    carry: Carry,
) -> Carry:
  """One iteration, of the part of this number: while the stages compute, the next repeat's chunk arrives."""
  iterations, schedule, ring = pipeline.iterations, pipeline.schedule, pipeline.ring
  state, carried = carry
  weights = of_all.ordered(of_all.in_iteration(carried, loaded))
  repeat, chunk = iterations.repeat(t), iterations.item(t) % schedule.microbatches
  part = pipeline.parts[number]
  groups, beside = list[list[int]](), list[OnDevices | None]()  # what arrives while experts compute
  if phase.advances:
    following = iterations.repeat(t, after=1)
    if any(w.replaces for w in weights):
      # What arrives takes the memory of the repeat before, which has to be done. What it offloads may still travel.
      travels = [one is not None for one in state.to_send]
      stays = [[] if travels[k] else of_turns for k, of_turns in enumerate(state.saved)]
      done, following = jax.lax.optimization_barrier((state._replace(saved=stays, to_send=[]), following))
      saved = [state.saved[k] if travels[k] else of_turns for k, of_turns in enumerate(done.saved)]
      state = done._replace(saved=saved, to_send=state.to_send)
    exchanges = part.program.exchanges(save=save) if pipeline.transfers_beside_experts else 0
    groups = of_all.in_groups(weights, exchanges)
    beside = of_all.gathers(weights, following, chunk, groups)
    weights = of_all.gather(weights, following, chunk, but={k for group in groups for k in group})
  used = of_all.use(weights, repeat)
  if save:
    state = state._replace(saved=host_memory.sent(pipeline, number, state.saved, state.to_send, t, turn))
  x, stage_aux = ring.read(t, state.store), pipeline.aux_at(aux, t)
  buffers = [of_turns[turn] for of_turns in state.saved]
  kept = _Kept(part.program, buffers, part.place(t, iterations.turns), reads=iterations.compiled)
  y, intermediates, arrived = part.program.run(used, stage_aux, x, kept.keep if save else None, beside)
  for group, arrays in zip(groups, arrived, strict=True):
    for k, arriving in zip(group, arrays, strict=True):
      weights[k] = weights[k].with_(arriving=arriving)
  # The compiler schedules a program from its end. It would therefore run operations that are independent of the stages,
  # such as gathers, while the outputs move. A barrier that ties them to the outputs makes the compiler run them while the
  # stages compute the outputs. Gathers that stop compute are not tied: they may as well run while the outputs leave.
  weights, y = of_all.behind_barrier(weights, _overlapped, ring.pass_on(t, state.store, ring.constrain(y)))
  leaving, held = (y, None) if state.held is None else (state.held, y)
  state = ForwardState(
      store=ring.write(t, ring.rotate(leaving), state.store),
      held=held,
      intermediates=jax.tree.map(
          lambda all_, one: put(all_, one, t, range(one.ndim)), state.intermediates, intermediates
      ),
      saved=[[*all_[:turn], kept.buffers[k], *all_[turn + 1 :]] for k, all_ in enumerate(state.saved)],
      to_send=kept.to_send,
  )
  if phase.advances:
    weights = of_all.ordered(of_all.place(weights, repeat, chunk))
  return state, of_all.carried(weights)


def _overlapped(weight: Weight) -> list[str]:
  """The arrays of a weight that are computed before the stages' outputs leave."""
  return ["buffers", "arriving"] if weight.is_gather_overlapped else ["buffers"]


class _Kept:
  """The buffers of residuals, while an iteration fills its place in them."""

  def __init__(self, program: StageProgram, buffers: list[PerIteration], index: jax.Array | int, *, reads: bool):
    self.buffers = buffers
    self.to_send: list[Residual | None] = [None] * len(buffers)
    self._program, self._index, self._reads = program, index, reads

  def keep(self, k: int, one: jax.Array) -> jax.Array:
    """Writes residual k into its buffer, or leaves it for `host_memory.sent`, which sends it to the host's memory.

    In compiled loops, what follows reads in the buffer what a product has computed.

    Otherwise the compiler (libtpu 0.0.48.1; benchmarks.workarounds residual_of_product) may let the product write it once
    for what follows, and copy that into the buffer. Without the barrier, it would put what was written in the place of
    this read. In unrolled loops, it may copy the buffer if the next iteration does not wait for what reads.

    Residuals of kernels are left in the order in which kernels return them. Otherwise the compiler (libtpu 0.0.48.1;
    benchmarks.workarounds residual_of_kernel) copies all that a kernel returns, of which the residual may be a 128th.
    """
    if self._program.saved_to_send[k]:
      self.to_send[k] = one
      return one
    order = self._program.saved_orders[k]
    self.buffers[k] = put(self.buffers[k], one, self._index, None if self._program.saved_by_kernels[k] else order)
    if not self._reads or not self._program.saved_by_products[k]:
      return one
    self.buffers[k] = jax.lax.optimization_barrier(self.buffers[k])
    return get(self.buffers[k], self._index, order)

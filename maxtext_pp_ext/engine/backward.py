# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The backward loops; see `engine.py` for the pseudo-code."""

from collections.abc import Sequence
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from maxtext_pp_ext.engine import host_memory
from maxtext_pp_ext.engine.buffers import get
from maxtext_pp_ext.engine.order import Done, in_order, Saved
from maxtext_pp_ext.engine.outside import OfCopies
from maxtext_pp_ext.engine.shapes import AtStages, Microbatches, Numbers, Param, Store
from maxtext_pp_ext.engine.traced import Part, Residuals, TracedPipeline
from maxtext_pp_ext.engine.weights import of_all
from maxtext_pp_ext.engine.weights.accumulators import Item
from maxtext_pp_ext.engine.weights.weight import there, Weight
from maxtext_pp_ext.schedule import Phase

PyTree = Any
# Segments whose gradients may be computed while a cotangent goes to another slice: the attention and the MLP of two
# layers. That takes about as long. In Llama 3 8B on v6e it takes 1.6 ms for a layer and 2048 tokens, and their cotangents
# travel for 4.1 ms at the rate of `hardware/chips.py`.
_LATE = 4


class BackwardState(NamedTuple):
  """Cotangents of the forward state's activations, and what the next iteration reads."""

  dstore: Store  # laid out like the store in `ring.py`
  dheld: AtStages | None  # with D = 2 the cotangent of the outputs that forward held back; None with D = 1
  arrived: AtStages | None  # what `_leaving` returns in the next iteration, if cotangents are sent back at once
  outside: list[jax.Array]  # sums of gradients of weights outside of the pipeline, as far as they are known
  fetched: host_memory.Travelling  # the next iteration's residuals from the host's memory; [] while none is on its way


class Cotangents(NamedTuple):
  """What backward gets: cotangents of outputs, of intermediates, leaves [T, S, …], and of copies of weights outside."""

  outputs: Microbatches
  intermediates: PyTree
  outside: list[OfCopies]


Carry = tuple[BackwardState, of_all.Carried]


@jax.named_scope("pipeline_backward")
def backward(
    pipeline: TracedPipeline, kept: Residuals, cotangents: Cotangents
) -> tuple[list[Param], Microbatches, list[jax.Array]]:
  """Runs all iterations in reverse.

  Args:
    pipeline: the pipeline.
    kept: the residuals that forward kept.
    cotangents: of what forward returned.

  Returns:
    (gradients of the parameters, in their dtypes and stored layout, cotangent of the inputs, gradients of the weights
    outside of the pipeline).
  """
  schedule, iterations = pipeline.schedule, pipeline.iterations
  # Buffers that backward alone needs take no memory before the cotangents are there, beside the logits. What needs no
  # other memory is left: then the last iteration is recomputed while the logits' weights are gathered.
  later = [w.current if w.has_next_buffer else None for w in kept.weights]
  given = cotangents.outputs, later, [jnp.zeros(()) for _ in later]
  outputs, later, behind = jax.lax.optimization_barrier(given)
  cotangents = cotangents._replace(outputs=outputs)
  loaded = [w if later[k] is None else w.with_(current=later[k]) for k, w in enumerate(kept.weights)]
  weights = of_all.carried([w.open(schedule.repeats - 1).zeros(behind[k]) for k, w in enumerate(loaded)])
  carry = _initial_state(pipeline, cotangents), weights
  advances = pipeline.gathers or pipeline.reduces
  fetches_for = None  # the number of a part
  phases = schedule.backward_phases(advances=advances, reduces=pipeline.reduces)
  if schedule.microbatches == 1 and any(w.is_partial and w.transfer.summed_after for w in loaded):
    phases = _first_reduction_apart(phases)
  for phase, number in pipeline.in_parts(phases, reverse=True):
    iteration = _Iteration(pipeline, number, kept, cotangents)
    body = iteration.at_once if schedule.microbatches == 1 else iteration.by_chunks
    if number != fetches_for:  # nothing has been fetched for the last iteration of a part
      fetches_for = number
      carry = iteration.fetch(pipeline.parts[number].last, carry[0]), carry[1]
    carry = iterations.loop(phase, functools.partial(body, phase), carry, reverse=True)
  state, carried = carry
  dinputs = pipeline.ring.enter_back(state.dstore, state.dheld)
  left = of_all.in_iteration(carried, kept.weights)
  finished = jnp.ones((schedule.stages,), jnp.int32)  # the repeat whose gradients `at_once` has only scattered
  return of_all.finish(of_all.add_scattered(left, finished, jnp.zeros_like(finished))), dinputs, state.outside


def _first_reduction_apart(phases: Sequence[Phase]) -> list[Phase]:
  """The phases; the first iteration that reduces has one of its own. Nothing is scattered before it."""
  number = next((k for k, phase in enumerate(phases) if phase.reduces), None)
  if number is None or phases[number].count == 1:
    return list(phases)
  phase, count = phases[number], phases[number].count - 1
  apart = dataclasses.replace(phase, first=phase.first + count, count=1)
  return [*phases[:number], apart, dataclasses.replace(phase, count=count), *phases[number + 1 :]]


def _initial_state(pipeline: TracedPipeline, cotangents: Cotangents) -> BackwardState:
  ring, schedule = pipeline.ring, pipeline.schedule
  dstore, arrived = ring.leave_back(cotangents.outputs)
  # The transpose of the forward's last transfer, which has no iteration of its own.
  dheld = ring.rotate_back(ring.write_back(schedule.iterations, dstore)) if schedule.delay == 2 else None
  return BackwardState(dstore, dheld, arrived, [each.nothing(ring) for each in cotangents.outside], [])


class _Iteration(NamedTuple):
  """An iteration of backward, with what all of them read."""

  pipeline: TracedPipeline
  number: int  # of the part that the iteration belongs to
  kept: Residuals
  cotangents: Cotangents

  @property
  def part(self) -> Part:
    return self.pipeline.parts[self.number]

  @property
  def weights(self) -> list[Weight]:
    return self.part.of(self.kept.weights)

  def by_chunks(self, phase: Phase, t: jax.Array | int, turn: int, carry: Carry) -> Carry:
    """An iteration with one of several microbatches: a chunk of a sum leaves, and a chunk of a weight takes its place."""
    iterations, schedule = self.pipeline.iterations, self.pipeline.schedule
    state, carried = carry
    weights = of_all.ordered(of_all.in_iteration(carried, self.weights))
    item, repeat, before = iterations.item(t), iterations.repeat(t), iterations.repeat(t, after=-1)
    chunk = schedule.microbatches - 1 - item % schedule.microbatches
    dleaving = self._leaving(t, state)
    if phase.reduces:
      weights = _behind_their_own_chunks(of_all.cut_out(weights, repeat, chunk))
      weights = of_all.reduce(weights, iterations.repeat(t, after=1), chunk)
    if phase.advances:
      # The barrier separates two transfers that would otherwise run at the same time. The reduction runs while the
      # forward is recomputed and the cotangents arrive; the gather follows, until each weight's own gradient is computed.
      dleaving, chunk, before = jax.lax.optimization_barrier((dleaving, chunk, before))
      weights = of_all.gather(weights, before, chunk)
    of_item = self._item(t, finishes=phase.advances)
    state, done = self._stages(t, turn, state, dleaving, weights, of_item, chunk)
    weights = of_all.ordered(of_all.add_complete(done.weights, done.complete, repeat, of_item.works))
    # `in_order` has already placed the chunks of weights that nothing reads any more. All else that changes the buffers
    # comes after the stages, which read them.
    weights, state = of_all.behind_barrier(weights, ["buffers"], state)
    if of_item.finishes is not None:
      weights = of_all.ordered(of_all.place(weights, repeat, chunk))
      weights = of_all.finish_repeat(weights, repeat, of_item.finishes)
    return self.fetch(t - 1, state), of_all.carried([w.with_(scattered=None) for w in weights])

  def at_once(self, phase: Phase, t: jax.Array | int, turn: int, carry: Carry) -> Carry:
    """An iteration at repeat r of the only microbatch: gradients of r + 1 are reduced, weights of r − 1 arrive.

    Where replicas are in several slices, gradients of r + 1 are only scattered, and those of r + 2 are summed.
    """
    iterations = self.pipeline.iterations
    state, carried = carry
    weights = of_all.in_iteration(carried, self.weights)
    # Reductions do not begin before the iteration, but for sums over replicas in other slices.
    weights, state = of_all.behind_barrier(weights, _behind_iteration_before, state)
    repeat, before = iterations.repeat(t), iterations.repeat(t, after=-1)
    chunk = jnp.zeros_like(repeat)
    dleaving = self._leaving(t, state)
    if phase.reduces:
      weights = _behind_all_sums(of_all.cut_out(weights, repeat, chunk))
      # The compiler lets sums over slices begin late. With a whole iteration they end in time.
      weights = of_all.add_scattered(weights, iterations.repeat(t, after=2), chunk)
      weights = of_all.scatter(weights, iterations.repeat(t, after=1), chunk)
      # A gradient takes the memory of the one before, which leaves it first (`Weight.reduced`): here, if it is computed
      # first, or if no compute hides how it leaves. The others leave until `in_order` computes their weight's next one.
      weights, dleaving = of_all.behind_barrier(weights, _reduced_first, dleaving)
    # If weights are gathered on the SparseCores, gathers share no time with reductions, whose longest they would delay.
    # They begin in the middle of the iteration (`in_order`), and have until its end. Llama 3 8B on v6e-16 takes 3.98 s
    # if they begin at once, and 3.41 s so (`python -m benchmarks.compiler_figures --shape llama3-8b-8-parts --keep …`).
    apart = self.part.program.gradients.gathers_after is not None
    if phase.advances:
      dleaving, before = jax.lax.optimization_barrier((dleaving, before))
      if not apart:
        weights = of_all.gather(weights, before, chunk)
    of_item = self._item(t, finishes=phase.advances)
    state, done = self._stages(t, turn, state, dleaving, weights, of_item, chunk, behind=before)
    weights = done.weights
    if phase.advances and apart:
      weights = of_all.gather(weights, there(done.behind), chunk)
    weights = of_all.add_complete(weights, done.complete, repeat, of_item.works)
    # Repeat r − 1 takes the place of repeat r when the stages have read it.
    weights, state = of_all.behind_barrier(weights, ["buffers"], state)
    if phase.advances:
      weights = of_all.place(weights, repeat, chunk)
    return self.fetch(t - 1, state), of_all.carried(weights)

  def _item(self, t: jax.Array | int, *, finishes: bool) -> Item:
    """The items of an iteration; `finishes` says whether stages go on to another repeat in its phase."""
    iterations, schedule = self.pipeline.iterations, self.pipeline.schedule
    item, works = iterations.item(t), iterations.works(t)
    last = works & schedule.begins_repeat(item) & (item > 0) if finishes else None
    return Item(repeat=iterations.repeat(t), works=works, first=works & schedule.ends_repeat(item), finishes=last)

  def _stages(
      self,
      t: jax.Array | int,
      turn: int,
      state: BackwardState,
      dleaving: AtStages,
      weights: list[Weight],
      item: Item,
      chunk: Numbers,
      behind: Numbers | None = None,
  ) -> tuple[BackwardState, Done]:
    """All stages in reverse, from the cotangent of the activations that leave them at the iteration's end."""
    iterations, ring, program = self.pipeline.iterations, self.pipeline.ring, self.part.program
    place = jnp.asarray(self.part.place(t, iterations.turns))
    dy, dheld = (dleaving, None) if state.dheld is None else (state.dheld, dleaving)
    inputs = program.inputs_of_backward(
        of_all.use(weights, item.repeat),
        self.pipeline.aux_at(self.kept.aux, t),
        [
            Saved(functools.partial(get, all_[turn], order=program.saved_orders[k]), place)
            if state.fetched[k] is None
            else state.fetched[k]
            for k, all_ in enumerate(self.kept.saved[self.number])
        ],
        ring.constrain(dy),
        jax.tree.map(lambda all_: _cotangent_at(all_, t), self.cotangents.intermediates),
    )
    beside_experts, late = self.pipeline.transfers_beside_experts, _LATE if ring.sends_back_at_once else 0
    done = in_order(program.gradients, inputs, weights, item, chunk, behind, beside_experts=beside_experts, late=late)
    (dx,) = done.others
    sums = zip(self.cotangents.outside, state.outside, strict=True)
    outside = [of_copies.add_part(ring, t, total) for of_copies, total in sums]
    if outside and ring.sends_back_at_once:
      # The parts travel while the cotangent is computed, which leaves behind them.
      dx, outside = jax.lax.optimization_barrier((dx, outside))
    dstore = ring.read_back(t, ring.pass_on_back(t, dy, ring.constrain(dx)), state.dstore)
    # Over slices a transfer takes longer than what is recomputed. So the cotangent leaves at once, and the gradients of
    # weights are computed meanwhile.
    arrived = ring.rotate_back(ring.write_back(t - 1, dstore)) if ring.sends_back_at_once else None
    return BackwardState(dstore, dheld, arrived, outside, []), done

  def _leaving(self, t: jax.Array | int, state: BackwardState) -> AtStages:
    """The cotangent of what leaves the stages at the end of the iteration."""
    if state.arrived is not None:
      return state.arrived
    ring = self.pipeline.ring
    return ring.rotate_back(ring.write_back(t, state.dstore))

  def fetch(self, t: jax.Array | int, state: BackwardState) -> BackwardState:
    """The state with what iteration t reads of the host's memory."""
    return state._replace(fetched=host_memory.fetched(self.pipeline, self.number, self.kept.saved[self.number], t))


def _behind_their_own_chunks(weights: list[Weight]) -> list[Weight]:
  """The weights; what changes buffers in which a sum waits comes after its chunk has been cut out.

  One by one: chunks of layers whose backward comes late need no memory before.
  """
  waits = lambda w: w.is_partial and w.sums_wait_in_buffers
  return [of_all.behind_barrier([w], ["buffers", "leaving"])[0][0] if waits(w) else w for w in weights]


def _behind_all_sums(weights: list[Weight]) -> list[Weight]:
  """The weights; if any reduction overlaps with compute, reductions and what changes buffers come after all sums.

  Otherwise reductions would take turns with gathers: 1.10 s instead of 1.08 for a window of Llama 3 8B on v6e
  (`python -m benchmarks.overlap`).
  """
  if not any(w.is_partial and not w.is_reduction_exposed for w in weights):
    return weights
  return of_all.behind_barrier(weights, ["buffers", "leaving"])[0]


def _behind_iteration_before(weight: Weight) -> list[str]:
  """The arrays of a weight that are computed before an iteration begins. Sums over slices may end in it."""
  return ["total", "stored"] if weight.scattered is None else ["total"]


def _reduced_first(weight: Weight) -> list[str]:
  """The arrays of a weight that are computed before an iteration's first gradient."""
  is_early = weight.gradient is not None and weight.gradient.is_early
  return [weight.reduced] if is_early or weight.is_reduction_exposed else []


def _cotangent_at(all_: jax.Array, t: jax.Array | int) -> jax.Array:
  return all_[0] if all_.dtype == jax.dtypes.float0 else get(all_, t, range(all_.ndim - 1))

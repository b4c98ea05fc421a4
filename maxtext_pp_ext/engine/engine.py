# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The circular pipeline as one differentiable function with a hand-written VJP.

Symbols as in `schedule.circular`. At iteration t stage s is at item n = t − D·s, which is microbatch n mod M of repeat
r = ⌊n / M⌋. Each stage keeps its own time. Its program, with the gather policy `repeat` and M > 1:

  forward                                    backward, in reverse
    current = repeat 0                         current: forward's last; total = 0
    for t = 0 … T − 1:                         for t = T − 1 … 0:
                                                 chunk M − 1 − n mod M of next is reduced → gradient of repeat r + 1
      y = stage(current, x)                      total += gradient of stage(current, x)
      chunk n mod M of repeat r + 1 → next       chunk M − 1 − n mod M of repeat r − 1 → next, in its place
      after the last item of r: current ↔ next   after the first item of r > 0: total → current; total = 0; current ↔ next
      y → next stage                             cotangent of x → stage before
                                               total is reduced → gradient of repeat 0

Backward also adds up gradients of weights outside of the pipeline, one part in each iteration (`outside.py`).

With one microbatch a repeat arrives whole (`weights/whole.py`), and gradients of replicas in other slices are added up
an iteration after they are scattered. With `iteration` there are neither buffers nor totals. With `once` all repeats
are gathered before t = 0. The chunks of a repeat add up to one gather in each direction and one reduction. The two
chunks of an iteration depend on nothing else in it, so its computation can hide their transfers: those between two
devices, those on the SparseCores (`Transfer.is_asynchronous`), and gathers on v5e. Others stop compute. With D = 2 it
can also hide that of the activation. Nothing is gathered in a direction's last repeat, and nothing reduced before
backward has finished a repeat. So each direction runs a few loops, whose bodies differ only in those lines.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import Any

import jax

from maxtext_pp_ext.engine.backward import backward, Cotangents
from maxtext_pp_ext.engine.forward import forward
from maxtext_pp_ext.engine.outside import copies, OfCopies, Outside
from maxtext_pp_ext.engine.programs.stage import StageFn, StageProgram
from maxtext_pp_ext.engine.ring import Ring
from maxtext_pp_ext.engine.shapes import Microbatches, Param
from maxtext_pp_ext.engine.traced import AuxAt, Iterations, Part, Residuals, TracedPipeline
from maxtext_pp_ext.engine.transfers.memory_order import matrix_unit
from maxtext_pp_ext.engine.weights import of_all
from maxtext_pp_ext.engine.weights.layout import WeightLayout
from maxtext_pp_ext.engine.weights.weight import Weight
from maxtext_pp_ext.schedule import GatherPolicy, Schedule

PyTree = Any
# (first iteration, what wraps the stages of one iteration in `jax.checkpoint` from it on; None keeps all residuals), in
# ascending order from iteration 0
Checkpoints = Sequence[tuple[int, Callable[[Callable], Callable] | None]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Engine:
  """Runs stages over microbatches as a circular pipeline."""

  schedule: Schedule  # which stage works on which item at which iteration
  ring: Ring  # moves the activations
  gather_policy: GatherPolicy  # when weights are gathered, and how long they are kept
  layouts: list[WeightLayout]  # one per weight
  # all stages of one iteration, (weights [S, …], aux [S, …], x [S, microbatch, sequence, embed]) -> (y like x,
  # intermediates [S, …])
  stages: StageFn
  # (aux, t) -> the stages' aux of iteration t: inputs without gradients, such as ids and random keys. Stages work on
  # microbatches in the order of `schedule.moves.numbers`, as the intermediates that the engine returns have them.
  aux_at: AuxAt
  checkpoints: Checkpoints = ((0, None),)  # decides which residuals forward keeps for backward
  row_groups: int = 1  # into how many groups of rows layers split a microbatch; they compute one group at a time
  transfers_beside_experts: bool = False  # whether weights are transferred while experts compute (`exchanges.py`)
  loop_iterations: bool = True  # run iterations in a compiled loop (True) or unroll them
  loop_repeats: bool = True  # if iterations are unrolled, unroll those of one repeat and run repeats in a compiled loop

  def __call__(self, params: list[Param], aux: PyTree, inputs: Microbatches) -> tuple[Microbatches, PyTree]:
    """`run` without weights outside of the pipeline: (outputs, intermediates)."""
    return self.run(params, aux, inputs)[:2]

  def run(
      self, params: list[Param], aux: PyTree, inputs: Microbatches, outside: Sequence[Outside] = ()
  ) -> tuple[Microbatches, PyTree, list[jax.Array]]:
    """Runs the pipeline.

    Args:
      params: the weights.
      aux: pytree of arrays for `aux_at`.
      inputs: the microbatches.
      outside: weights that every stage uses behind the pipeline, on its own rows. Backward adds up their gradients.

    Returns:
      Outputs like the inputs, the intermediates of each iteration, leaves [T, S, …], bubbles included, and the stages'
      copies of the weights outside, [S, …].
    """
    traced = self._trace(params, aux, inputs)
    specs = [each.spec for each in outside]

    def copied(outside):
      return [copies(self.ring, weight, spec) for weight, spec in zip(outside, specs, strict=True)]

    @jax.custom_vjp
    def pipeline(params, aux, inputs, outside):
      outputs, intermediates, _ = forward(traced, _load(traced, params), aux, inputs, save=False)
      return outputs, intermediates, copied(outside)

    def pipeline_fwd(params, aux, inputs, outside):
      loaded = _load(traced, params)
      outputs, intermediates, (weights, saved) = forward(traced, loaded, aux, inputs, save=True)
      weights = [w.keep(params[k]) for k, w in enumerate(weights)]
      return (outputs, intermediates, copied(outside)), Residuals(weights=weights, aux=aux, saved=saved)

    def pipeline_bwd(kept, cotangents):
      outputs, intermediates, dcopies = cotangents
      of_copies = [OfCopies(each, spec) for each, spec in zip(dcopies, specs, strict=True)]
      dparams, dinputs, doutside = backward(traced, kept, Cotangents(outputs, intermediates, of_copies))
      return dparams, None, dinputs, doutside

    pipeline.defvjp(pipeline_fwd, pipeline_bwd)
    return pipeline(params, aux, inputs, [each.weight for each in outside])

  def _trace(self, params: list[Param], aux: PyTree, inputs: Microbatches) -> TracedPipeline:
    """Traces the stages once for each checkpoint, on iteration 0.

    Only types matter: the compiler drops the values, which nothing uses.
    """
    weights = of_all.weights_of(self.layouts, params, self.ring.mesh, self.gather_policy, self.schedule.microbatches)
    iterations = Iterations(
        schedule=self.schedule,
        compiled=self.loop_iterations,
        compiled_repeats=self.loop_repeats,
        replaces=any(w.replaces and w.has_buffers for w in weights),
    )
    batch = self.ring.batch_axes(inputs)
    # As if there were one repeat: then `use` returns the weight alone, and the trace has no choice between buffers.
    alone = [w.load(params[k]).first().with_(shape=(1, *w.shape[1:])).open(0) for k, w in enumerate(weights)]
    trace = functools.partial(
        StageProgram.trace,
        self.stages,
        of_all.use(alone, iterations.repeat(0)),
        self.aux_at(aux, 0),
        self.ring.read(0, self.ring.enter(inputs)[0]),
        splits=[layout.batch_splits(self.ring.mesh, batch, self.row_groups) for layout in self.layouts],
        batch_axes=[a for _, axes in batch for a in axes],
        on_sparsecores=any(w.replaces and w.has_buffers and w.transfer.on_sparsecores for w in weights),
        summed=self.schedule.microbatches > 1,
        matrix_unit=matrix_unit(self.ring.mesh),
    )
    ends = [*(first for first, _ in self.checkpoints[1:]), self.schedule.iterations]
    parts = tuple(
        Part(first=first, last=ends[k] - 1, program=trace(checkpoint=checkpoint))
        for k, (first, checkpoint) in enumerate(self.checkpoints)
    )
    program = parts[-1].program
    if any(
        [g.parts for g in p.program.gradients.gradients] != [g.parts for g in program.gradients.gradients] for p in parts
    ):
      raise NotImplementedError(
          "A gradient is a partial sum with one remat policy and complete with another. Leave pipeline_remat_iterations "
          "out."
      )
    weights = [w.with_(order=program.orders[k], of_kernels=program.of_kernels[k]) for k, w in enumerate(weights)]
    return TracedPipeline(
        iterations=iterations,
        ring=self.ring,
        weights=parts[-1].of(weights),
        parts=parts,
        aux_at=self.aux_at,
        transfers_beside_experts=self.transfers_beside_experts,
    )


@jax.named_scope("gather")
def _load(traced: TracedPipeline, params: list[Param]) -> list[Weight]:
  """The weights with what they are gathered from."""
  return [w.load(params[k]) for k, w in enumerate(traced.weights)]

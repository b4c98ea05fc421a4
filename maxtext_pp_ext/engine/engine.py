# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The circular pipeline as one differentiable function with a hand-written VJP.

Symbols as in `schedule.circular`. At iteration t stage s is at item n = t − D·s, which is microbatch n mod M of repeat
r = ⌊n / M⌋. Each stage keeps its own time, so this is the program of every stage:

  forward                                        backward, in reverse
    current = repeat 0                             current: forward's last; total = 0
    for t = 0 … T − 1:                             for t = T − 1 … 0:
                                                     chunk −1 − n mod M of next is reduced → gradient of repeat r + 1
      y = stage(current, x)                          total += gradient of stage(current, x)
      chunk n mod M of repeat r + 1 → next           chunk −1 − n mod M of repeat r − 1 → next, in its place
      after the last item of r: current ↔ next       after the first item of r: current = total; total = 0; current ↔ next
      y → next stage                                 cotangent of x → stage before
                                                   total is reduced → gradient of repeat 0

Three things cross device boundaries in an iteration: a chunk of a weight, a chunk of a gradient and an activation. The
two chunks depend on nothing else in the iteration, so its computation hides their transfers; with D = 2 it also hides
that of the activation. The chunks of a repeat add up to one gather in each direction and one reduction. There is nothing
to gather while a direction's last repeat is in work, and nothing to reduce until backward has finished a repeat. So each
direction runs a few loops, whose bodies differ only in those lines.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
from typing import Any

import jax

from maxtext_pp_ext.engine.backward import backward, Cotangents
from maxtext_pp_ext.engine.forward import forward
from maxtext_pp_ext.engine.programs.stage import StageFn, StageProgram
from maxtext_pp_ext.engine.ring import Ring
from maxtext_pp_ext.engine.shapes import Microbatches, Param
from maxtext_pp_ext.engine.traced import AuxAt, Iterations, Residuals, TracedPipeline
from maxtext_pp_ext.engine.weights import of_all
from maxtext_pp_ext.engine.weights.layout import WeightLayout
from maxtext_pp_ext.engine.weights.weight import Weight
from maxtext_pp_ext.schedule import GatherPolicy, Schedule

PyTree = Any


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
  # (aux, t) -> the stages' aux of iteration t: inputs without gradients, such as segment ids and random keys
  aux_at: AuxAt
  checkpoint: Callable[[Callable], Callable] | None = None  # wraps a stage in `jax.checkpoint`; None keeps all residuals
  # the number of groups of rows into which layers split a microbatch; they compute one group at a time
  row_groups: int = 1
  loop_iterations: bool = True  # run iterations in a compiled loop (True) or unroll them
  loop_repeats: bool = True  # if iterations are unrolled, unroll those of one repeat and run repeats in a compiled loop

  def __call__(self, params: list[Param], aux: PyTree, inputs: Microbatches) -> tuple[Microbatches, PyTree]:
    """Runs the pipeline.

    Args:
      params: the weights.
      aux: pytree of arrays for `aux_at`.
      inputs: the microbatches.

    Returns:
      Outputs like the inputs, and the intermediates of each iteration, leaves [T, S, …], bubbles included.
    """
    traced = self._trace(params, aux, inputs)

    @jax.custom_vjp
    def pipeline(params, aux, inputs):
      outputs, intermediates, _ = forward(traced, _load(traced, params), aux, inputs, save=False)
      return outputs, intermediates

    def pipeline_fwd(params, aux, inputs):
      loaded = _load(traced, params)
      outputs, intermediates, (weights, saved) = forward(traced, loaded, aux, inputs, save=True)
      weights = [w.keep(params[k]) for k, w in enumerate(weights)]
      return (outputs, intermediates), Residuals(weights=weights, aux=aux, saved=saved)

    def pipeline_bwd(kept, cotangents):
      dparams, dinputs = backward(traced, kept, Cotangents(*cotangents))
      return dparams, None, dinputs

    pipeline.defvjp(pipeline_fwd, pipeline_bwd)
    return pipeline(params, aux, inputs)

  def _trace(self, params: list[Param], aux: PyTree, inputs: Microbatches) -> TracedPipeline:
    """Traces the stages once, on the values of iteration 0 (unused, so the compiler drops them)."""
    weights = of_all.weights_of(self.layouts, params, self.ring.mesh, self.gather_policy, self.schedule.microbatches)
    iterations = Iterations(schedule=self.schedule, compiled=self.loop_iterations, compiled_repeats=self.loop_repeats)
    batch = self.ring.batch_axes(inputs)
    # As with one repeat, so that nothing is chosen from a double buffer.
    alone = [w.load(params[k]).first().with_(shape=(1, *w.shape[1:])).open(0) for k, w in enumerate(weights)]
    program = StageProgram.trace(
        self.stages,
        of_all.use(alone, iterations.repeat(0)),
        self.aux_at(aux, 0),
        self.ring.read(0, *self.ring.buffers(inputs)),
        self.checkpoint,
        [layout.batch_splits(self.ring.mesh, batch, self.row_groups) for layout in self.layouts],
        [a for _, axes in batch for a in axes],
        gathered_in_steps=any(w.replaces and w.has_buffers and w.transfer.in_steps for w in weights),
        summed=self.schedule.microbatches > 1,
    )
    weights = [
        w.with_(
            order=program.orders[k],
            of_kernels=program.of_kernels[k],
            gradient=program.gradients.gradients[k],
        )
        for k, w in enumerate(weights)
    ]
    return TracedPipeline(iterations=iterations, ring=self.ring, weights=weights, program=program, aux_at=self.aux_at)


@jax.named_scope("gather")
def _load(traced: TracedPipeline, params: list[Param]) -> list[Weight]:
  """The weights with what they are gathered from."""
  return [w.load(params[k]) for k, w in enumerate(traced.weights)]

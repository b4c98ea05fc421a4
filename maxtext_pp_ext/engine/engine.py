# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The circular pipeline as one differentiable function with a hand-written VJP.

Symbols as in `schedule.circular`. At iteration t stage s is at item n = t − D·s, which is microbatch n mod M of repeat
r = ⌊n / M⌋. Each stage keeps its own time, so this is the program of every stage:

  forward                                        backward, in reverse
    slot = repeat 0                                slot: forward's last; total = 0
    for t = 0 … T − 1:                             for t = T − 1 … 0:
                                                     piece −1 − n mod M of buffer is reduced → gradient of repeat r + 1
      y = stage(slot, x)                             total += gradient of stage(slot, x)
      piece n mod M of repeat r + 1 → buffer         piece −1 − n mod M of repeat r − 1 → buffer, in its place
      after the last item of r: slot ↔ buffer        after the first item of r: slot = total; total = 0; slot ↔ buffer
      y → next stage                                 cotangent of x → stage before
                                                   total is reduced → gradient of repeat 0

Three things cross device boundaries in an iteration: a piece of a weight, a piece of a gradient and an activation. The
two pieces depend on nothing else in the iteration, so its computation hides their transfers; with D = 2 it also hides
that of the activation. The pieces of a repeat add up to one gather in each direction and one reduction. There is nothing
to gather while a direction's last repeat is in work, and nothing to reduce until backward has finished a repeat. So each
direction runs a few loops, whose bodies differ only in those lines.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
from typing import Any

import jax

from maxtext_pp_ext.engine.backward import backward
from maxtext_pp_ext.engine.forward import forward
from maxtext_pp_ext.engine.programs.stage import StageFn, StageProgram
from maxtext_pp_ext.engine.ring import Ring
from maxtext_pp_ext.engine.sums import splits
from maxtext_pp_ext.engine.traced import AuxAt, Iterations, Residuals, TracedPipeline
from maxtext_pp_ext.engine.weights import Arrays, Weights
from maxtext_pp_ext.schedule import Schedule

PyTree = Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Engine:
  """Runs stages over microbatches as a circular pipeline.

  Attributes:
    schedule: which stage works on which item at which iteration.
    ring: moves the activations.
    weights: fetches the weights and reduces their gradients.
    stages: all stages of one iteration, (weights [S, …], aux [S, …], x [S, microbatch, sequence, embed]) ->
      (y like x, intermediates [S, …]).
    aux_at: (aux, t) -> the stages' aux of iteration t: inputs without gradients, such as segment ids and random keys.
    checkpoint: wraps a stage in `jax.checkpoint`; None keeps all residuals.
    row_groups: the number of groups of rows into which layers split a microbatch; they compute one group at a time.
    loop_iterations: run iterations in a compiled loop (True) or unroll them.
    loop_repeats: if iterations are unrolled, unroll those of one repeat and run repeats in a compiled loop.
  """

  schedule: Schedule
  ring: Ring
  weights: Weights
  stages: StageFn
  aux_at: AuxAt
  checkpoint: Callable[[Callable], Callable] | None = None
  row_groups: int = 1
  loop_iterations: bool = True
  loop_repeats: bool = True

  def __call__(self, params: Arrays, aux: PyTree, inputs: jax.Array) -> tuple[jax.Array, PyTree]:
    """Runs the pipeline.

    Args:
      params: weights, leaves [R, S, …].
      aux: pytree of arrays for `aux_at`.
      inputs: [M, microbatch, sequence, embed].

    Returns:
      Outputs like the inputs, and the intermediates of each iteration, leaves [T, S, …], bubbles included.
    """
    traced = self._trace(params, aux, inputs)

    @jax.custom_vjp
    def pipeline(params, aux, inputs):
      outputs, intermediates, _ = forward(traced, self.weights.load(params), aux, inputs, save=False)
      return outputs, intermediates

    def pipeline_fwd(params, aux, inputs):
      loaded = self.weights.load(params)
      outputs, intermediates, (slot, saved) = forward(traced, loaded, aux, inputs, save=True)
      kept = Residuals(loaded=self.weights.keep(params, loaded), params=params, aux=aux, slot=slot, saved=saved)
      return (outputs, intermediates), kept

    def pipeline_bwd(kept, cotangents):
      dparams, dinputs = backward(traced, kept, *cotangents)
      return dparams, None, dinputs

    pipeline.defvjp(pipeline_fwd, pipeline_bwd)
    return pipeline(params, aux, inputs)

  def _trace(self, params: Arrays, aux: PyTree, inputs: jax.Array) -> TracedPipeline:
    """Traces the stages once, on the values of iteration 0 (unused, so the compiler drops them)."""
    iterations = Iterations(schedule=self.schedule, compiled=self.loop_iterations, compiled_repeats=self.loop_repeats)
    loaded = self.weights.load(params)
    window = self.weights.window(self.weights.first(loaded), 0, repeats=1)
    slot = self.weights.at(window, loaded, iterations.repeat(0))
    x = self.ring.read(0, *self.ring.buffers(inputs))
    batch = self.ring.batch_axes(inputs)
    axes = [a for _, axes in batch for a in axes]
    program = StageProgram.trace(
        self.stages,
        slot,
        self.aux_at(aux, 0),
        x,
        self.checkpoint,
        splits(self.weights.mesh, self.weights.layouts, batch, self.row_groups),
        axes,
        gathered_in_steps=self.weights.in_steps(params),
        summed=self.schedule.microbatches > 1,
    )
    weights = dataclasses.replace(self.weights, orders=program.orders, of_kernels=program.of_kernels)
    return TracedPipeline(iterations=iterations, ring=self.ring, weights=weights, program=program, aux_at=self.aux_at)

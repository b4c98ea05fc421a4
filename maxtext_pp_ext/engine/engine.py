# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The circular pipeline as one differentiable function with a hand-written VJP.

Pseudo-code (S, M, R, D, t as in `schedule.circular`; B = D·(S − 1), the mixed offsets of a window):

  forward                                              backward, in reverse
    slot = fetch(0)                                      slot: forward's last
    iterations 0 … B − 1 with slot           (warm-up)   iterations T − 1 … (R−1)·M + B: add to gradient
    for r = 0 … R − 2:                                   for r = R − 2 … 0:
      next = fetch(r + 1)                                  previous = fetch(r)
      iterations r·M + B … (r+1)·M − 1 with slot           iterations (r+1)·M + B − 1 … (r+1)·M − 1:
      iterations (r+1)·M … (r+1)·M + B − 1:                  stages go from slot to previous one by one,
        stage s with next if offset ≥ D·s else slot          and leave the gradient of r + 1 behind: reduce it
      slot = next                                          slot = previous
                                                           iterations (r+1)·M − 2 … r·M + B: add to gradient
    iterations (R−1)·M + B … T − 1 with slot             iterations B − 1 … 0: add to gradient; reduce it

`fetch(r + 1)` does not depend on the steady iterations that follow it, and the slot it fills was last read before
them: the gather has that much compute to hide behind, without a third slot. Only the mixed iterations choose between
two slots. Bubbles exist in the warm-up and in the last window only, so nothing is masked in between.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

import jax

from maxtext_pp_ext.engine.backward import backward
from maxtext_pp_ext.engine.forward import forward
from maxtext_pp_ext.engine.residency import Weights
from maxtext_pp_ext.engine.ring import Ring
from maxtext_pp_ext.engine.stage import StageFn, StageProgram
from maxtext_pp_ext.schedule import CircularSchedule

PyTree = Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Engine:
  """Runs stages over microbatches as a circular pipeline.

  Attributes:
    schedule: who works on what when.
    ring: moves the activations.
    weights: fetches the weights and reduces their gradients.
    stages: all stages of one iteration, (weights [S, …], aux [S, …], x [S, microbatch, sequence, embed]) ->
      (y like x, intermediates [S, …]).
    aux_at: (aux, t) -> the stages' aux of iteration t: what is not differentiated, such as segment ids and random keys.
    checkpoint: wraps a stage in `jax.checkpoint`; None keeps all residuals.
    loop_iterations: run iterations in a compiled loop (True) or unroll them.
    loop_repeats: run windows in a compiled loop (True) or unroll them.
  """

  schedule: CircularSchedule
  ring: Ring
  weights: Weights
  stages: StageFn
  aux_at: Callable[[PyTree, jax.Array], PyTree]
  checkpoint: Callable[[Callable], Callable] | None = None
  loop_iterations: bool = True
  loop_repeats: bool = True

  def __call__(self, params: PyTree, aux: PyTree, inputs: jax.Array) -> tuple[jax.Array, PyTree]:
    """Runs the pipeline.

    Args:
      params: weights, leaves [R, S, …].
      aux: pytree of arrays for `aux_at`.
      inputs: [M, microbatch, sequence, embed].

    Returns:
      Outputs like the inputs, and the intermediates of each iteration, leaves [T, S, …], bubbles included.
    """
    program = self._trace(params, aux, inputs)
    engine = dataclasses.replace(self, weights=self.weights.with_partials(list(program.gradients.parts)))

    @jax.custom_vjp
    def pipeline(params, aux, inputs):
      outputs, intermediates, _ = forward(engine, program, engine.weights.load(params), aux, inputs, save=False)
      return outputs, intermediates

    def pipeline_fwd(params, aux, inputs):
      loaded = engine.weights.load(params)
      outputs, intermediates, saved = forward(engine, program, loaded, aux, inputs, save=True)
      return (outputs, intermediates), (engine.weights.keep(params, loaded), params, aux, saved)

    def pipeline_bwd(residuals, cotangents):
      loaded, params, aux, (slot, saved) = residuals
      dparams, dinputs = backward(engine, program, loaded, slot, params, aux, saved, *cotangents)
      return dparams, None, dinputs

    pipeline.defvjp(pipeline_fwd, pipeline_bwd)
    return pipeline(params, aux, inputs)

  def _trace(self, params: PyTree, aux: PyTree, inputs: jax.Array) -> StageProgram:
    """Traces the stages once, on the values of iteration 0 (unused, so the compiler drops them)."""
    slot = self.weights.use(self.weights.fetch(self.weights.load(params), 0))
    x = self.ring.read(0, *self.ring.buffers(inputs), bubbles=True)
    batch = self.ring.batch_axes(inputs)
    axes = [a for _, axes in batch for a in axes]
    return StageProgram.trace(
        self.stages, slot, self.aux_at(aux, 0), x, self.checkpoint, self.weights.splits(batch), axes
    )

  def loop_over_iterations(
      self, body: Callable, first: Any, count: int, carry: PyTree, *, reverse: bool = False
  ) -> PyTree:
    """`carry = body(t, carry)` for the iterations first … first + count − 1, or from the last to the first."""
    if reverse:
      at = lambda k: first + (count - 1 - k)
    else:
      at = lambda k: first + k
    return loop(count, lambda k, carry: body(at(k), carry), carry, compiled=self.loop_iterations)

  def loop_over_repeats(self, body: Callable, count: int, carry: PyTree, *, reverse: bool = False) -> PyTree:
    """`carry = body(r, carry)` for r = 0 … count − 1, or from the last to the first."""
    at = (lambda k: count - 1 - k) if reverse else (lambda k: k)
    return loop(count, lambda k, carry: body(at(k), carry), carry, compiled=self.loop_repeats)


def loop(count: int, body: Callable, carry: PyTree, *, compiled: bool) -> PyTree:
  """`carry = body(k, carry)` for k = 0 … count − 1, as one compiled loop or unrolled."""
  if count <= 0:
    return carry
  if compiled and count > 1:
    return jax.lax.fori_loop(0, count, body, carry)
  return functools.reduce(lambda c, k: body(k, c), range(count), carry)

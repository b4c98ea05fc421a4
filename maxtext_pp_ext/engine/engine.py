# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The circular pipeline as one differentiable function with a hand-written VJP.

Symbols as in `schedule.circular`. At iteration t stage s is at item n = t − D·s, which is microbatch n mod M of repeat
r = ⌊n / M⌋. Each stage keeps its own time, so this is the program of every stage:

  forward                                        backward, in reverse
    slot = repeat 0                                slot: forward's last; total = 0
    for t = 0 … T − 1:                             for t = T − 1 … 0:
                                                     piece −1 − n mod M of buffer is reduced → gradient of repeat r + 1
      piece n mod M of repeat r + 1 → buffer         piece −1 − n mod M of repeat r − 1 → buffer, in its place
      y = stage(slot, x)                             total += gradient of stage(slot, x)
      after the last item of r: slot = buffer        after the first item of r: slot = buffer; buffer = total; total = 0
      y → next stage                                 cotangent of x → stage before
                                                   total is reduced → gradient of repeat 0

What crosses device boundaries in an iteration, a piece of a weight, a piece of a gradient and an activation, depends on
nothing else in it: all of it has the iteration's computation to hide behind. The pieces of a repeat add up to one gather
in each direction and one reduction. While the last repeat is in work there is nothing to gather (and while the first one
finished is not yet there, nothing to reduce), so each direction runs a few loops with the same body, less those lines.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from maxtext_pp_ext.engine.backward import backward
from maxtext_pp_ext.engine.forward import forward
from maxtext_pp_ext.engine.gradients import Gradients, splits
from maxtext_pp_ext.engine.ring import Ring
from maxtext_pp_ext.engine.weights import Weights
from maxtext_pp_ext.engine.programs.stage import StageFn, StageProgram
from maxtext_pp_ext.schedule import Phase, Schedule

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
    row_groups: in how many groups of rows layers compute a microbatch, one after the other.
    loop_iterations: run iterations in a compiled loop (True) or unroll them.
    loop_repeats: if iterations are unrolled, unroll those of one repeat and run repeats in a compiled loop.
  """

  schedule: Schedule
  ring: Ring
  weights: Weights
  stages: StageFn
  aux_at: Callable[[PyTree, jax.Array], PyTree]
  checkpoint: Callable[[Callable], Callable] | None = None
  row_groups: int = 1
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

    @jax.custom_vjp
    def pipeline(params, aux, inputs):
      outputs, intermediates, _ = forward(self, program, self.weights.load(params), aux, inputs, save=False)
      return outputs, intermediates

    def pipeline_fwd(params, aux, inputs):
      loaded = self.weights.load(params)
      outputs, intermediates, saved = forward(self, program, loaded, aux, inputs, save=True)
      return (outputs, intermediates), (self.weights.keep(params, loaded), params, aux, saved)

    def pipeline_bwd(residuals, cotangents):
      loaded, params, aux, (slot, saved) = residuals
      dparams, dinputs = backward(self, program, loaded, slot, params, aux, saved, *cotangents)
      return dparams, None, dinputs

    pipeline.defvjp(pipeline_fwd, pipeline_bwd)
    return pipeline(params, aux, inputs)

  def _trace(self, params: PyTree, aux: PyTree, inputs: jax.Array) -> StageProgram:
    """Traces the stages once, on the values of iteration 0 (unused, so the compiler drops them)."""
    loaded = self.weights.load(params)
    slot = self.weights.at(self.weights.first(loaded), loaded, self.repeat(0))
    x = self.ring.read(0, *self.ring.buffers(inputs))
    batch = self.ring.batch_axes(inputs)
    axes = [a for _, axes in batch for a in axes]
    return StageProgram.trace(
        self.stages,
        slot,
        self.aux_at(aux, 0),
        x,
        self.checkpoint,
        splits(self.weights.mesh, self.weights.layouts, batch, self.row_groups),
        axes,
    )

  def gradients(self, program: StageProgram, params: PyTree) -> Gradients:
    """What adds the weights' gradients up."""
    return Gradients.of(self.weights, params, program.gradients.parts)

  @property
  def stage_numbers(self) -> jax.Array:
    """[S]: 0 … S − 1."""
    return jnp.arange(self.schedule.stages, dtype=jnp.int32)

  def item(self, t: jax.Array | int) -> jax.Array:
    """The item that each stage is at, [S]; outside 0 … M·R − 1 in bubbles."""
    return self.schedule.item(t, self.stage_numbers)

  def repeat(self, t: jax.Array | int, after: int = 0) -> jax.Array:
    """The repeat that each stage is at, or that many after it, [S]; the nearest there is where there is none."""
    repeats = self.schedule.repeat(t, self.stage_numbers) + after
    return jnp.clip(repeats, 0, self.schedule.repeats - 1)

  def loop_over_iterations(self, phase: Phase, body: Callable, carry: PyTree, *, reverse: bool = False) -> PyTree:
    """`carry = body(t, carry)` for the iterations of a phase, or from the last of them to the first."""
    first, count = phase.first, phase.count
    if reverse:
      at = lambda k: first + (count - 1 - k)
    else:
      at = lambda k: first + k
    step = lambda k, carry: body(at(k), carry)
    if self.loop_iterations:
      return loop(count, step, carry, compiled=True)
    # Unrolled, and if repeats are to be looped over, then only as many iterations as a repeat has.
    per_repeat = self.schedule.microbatches
    repeats, rest = divmod(count, per_repeat) if self.loop_repeats else (0, count)
    in_repeat = lambda r, carry: loop(per_repeat, lambda k, carry: step(r * per_repeat + k, carry), carry, compiled=False)
    carry = loop(repeats, in_repeat, carry, compiled=True)
    return loop(rest, lambda k, carry: step(repeats * per_repeat + k, carry), carry, compiled=False)


def loop(count: int, body: Callable, carry: PyTree, *, compiled: bool) -> PyTree:
  """`carry = body(k, carry)` for k = 0 … count − 1, as one compiled loop or unrolled."""
  if compiled and count > 1:
    return jax.lax.fori_loop(0, count, body, carry)
  return functools.reduce(lambda carry, k: body(k, carry), range(count), carry)

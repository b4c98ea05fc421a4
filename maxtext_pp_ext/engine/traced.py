# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""What the loops of both directions use: a pipeline with traced stages, and the residuals that forward keeps."""

from collections.abc import Callable, Iterator, Sequence
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from maxtext_pp_ext.engine.programs.stage import StageProgram
from maxtext_pp_ext.engine.ring import Ring
from maxtext_pp_ext.engine.shapes import Mask, Numbers, PerIteration
from maxtext_pp_ext.engine.weights.weight import Weight
from maxtext_pp_ext.schedule import Phase, Schedule

PyTree = Any
# For each part of the iterations and each residual, the buffer of each turn (`Iterations.turns`).
SavedOfParts = list[list[list[PerIteration]]]
# (aux, t) -> the stages' aux of iteration t, leaves [S, …].
AuxAt = Callable[[PyTree, jax.Array | int], PyTree]
# (iteration t, its turn, carry) -> carry; see `Iterations.turns`.
Body = Callable[[jax.Array | int, int, PyTree], PyTree]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Iterations:
  """The item and repeat of each stage in an iteration, and the loops over iterations."""

  schedule: Schedule  # which stage works on which item at which iteration
  compiled: bool = True  # run iterations in a compiled loop (True) or unroll them
  # if iterations are unrolled, unroll those of one repeat and run repeats in a compiled loop
  compiled_repeats: bool = True
  replaces: bool = False  # whether each iteration replaces the weights that are held

  @property
  def stage_numbers(self) -> Numbers:
    """0 … S − 1."""
    return jnp.arange(self.schedule.stages, dtype=jnp.int32)

  def item(self, t: jax.Array | int) -> Numbers:
    """The item that each stage is at; outside 0 … M·R − 1 in bubbles."""
    return self.schedule.item(t, self.stage_numbers)

  def repeat(self, t: jax.Array | int, after: int = 0) -> Numbers:
    """The repeat that each stage is at, plus `after`, clipped to [0, R − 1]."""
    repeats = self.schedule.repeat(t, self.stage_numbers) + after
    return jnp.clip(repeats, 0, self.schedule.repeats - 1)

  def works(self, t: jax.Array | int) -> Mask:
    """Whether each stage is not idle."""
    return ~self.schedule.is_bubble(t, self.stage_numbers)

  @property
  def turns(self) -> int:
    """How many iterations a compiled loop runs at a time: two, an even one and an odd one, if each replaces all weights.

    Two at a time, so that the loop need not copy the weights to where it reads them.
    Each turn writes into a buffer of its own. Of a buffer that a loop's body writes into twice, the TPU compiler (libtpu
    0.0.48.1; benchmarks.workarounds buffer_written_twice) counts the memory twice, and rematerialises what it need not:
    2 % of the products of Llama 3 70B on v5p with 73 GB of residuals.
    """
    return 2 if self.compiled and self.replaces else 1

  def loop(self, phase: Phase, body: Body, carry: PyTree, *, reverse: bool = False, in_pairs: bool = False) -> PyTree:
    """`carry = body(t, turn, carry)` for the iterations of a phase in ascending order, or descending if `reverse`.

    An iteration's turn, t modulo `turns`, is a Python number even where t is not. `in_pairs` says whether a compiled
    loop runs two iterations at a time, even if there is only one turn. It costs Llama 3 70B in four stages no products,
    with what benchmarks.policies keeps, and two arrays offloaded.
    """
    first, count = phase.first, phase.count
    if reverse:
      at = lambda k: first + (count - 1 - k)
    else:
      at = lambda k: first + k
    if self.turns == 2 or (in_pairs and self.compiled):
      in_turn = lambda k, place, carry: body(at(k), at(place) % self.turns, carry)  # t is even where at(place) is
      both = lambda k, carry: in_turn(2 * k + 1, 1, in_turn(2 * k, 0, carry))
      carry = _loop(count // 2, both, carry, compiled=True)
      return _loop(count % 2, lambda _, carry: in_turn(count - 1, count - 1, carry), carry, compiled=False)
    step = lambda k, carry: body(at(k), 0, carry)
    if self.compiled:
      return _loop(count, step, carry, compiled=True)
    # With a compiled loop over repeats, only the iterations of one repeat are unrolled.
    per_repeat = self.schedule.microbatches
    repeats, rest = divmod(count, per_repeat) if self.compiled_repeats else (0, count)
    in_repeat = lambda r, carry: _loop(
        per_repeat, lambda k, carry: step(r * per_repeat + k, carry), carry, compiled=False
    )
    carry = _loop(repeats, in_repeat, carry, compiled=True)
    return _loop(rest, lambda k, carry: step(repeats * per_repeat + k, carry), carry, compiled=False)


def _loop(count: int, body: Callable[[jax.Array | int, PyTree], PyTree], carry: PyTree, *, compiled: bool) -> PyTree:
  """`carry = body(k, carry)` for k = 0 … count − 1, as one compiled loop or unrolled."""
  if compiled and count > 1:
    return jax.lax.fori_loop(0, count, body, carry)
  return functools.reduce(lambda carry, k: body(k, carry), range(count), carry)


class Part(NamedTuple):
  """Successive iterations of which forward keeps the same for backward."""

  first: int  # the first of them
  last: int  # the last of them
  program: StageProgram  # all stages of one iteration

  def place(self, t: jax.Array | int, turns: int) -> jax.Array | int:
    """Where the buffers of iteration t's turn have its residuals."""
    return (t - self.first) // turns if self.first else t // turns

  def places(self, turns: int) -> list[int]:
    """For each turn, the places of its buffers; one at least, since compilers need not know buffers of none."""
    return [max(sum(t % turns == turn for t in range(self.first, self.last + 1)), 1) for turn in range(turns)]

  def of(self, weights: Sequence[Weight]) -> list[Weight]:
    """The weights, with the gradients that these iterations compute."""
    return [w.with_(gradient=self.program.gradients.gradients[k]) for k, w in enumerate(weights)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TracedPipeline:
  """A pipeline whose stages are traced."""

  iterations: Iterations  # the item and repeat of each stage, and the loops over iterations
  ring: Ring  # moves the activations
  weights: list[Weight]  # without arrays: what is known of them
  parts: tuple[Part, ...]  # all iterations
  aux_at: AuxAt  # (aux, t) -> the stages' inputs of iteration t that have no gradients
  # whether weights are transferred while experts compute, where these exchange tokens
  transfers_beside_experts: bool

  @property
  def schedule(self) -> Schedule:
    """Which stage works on which item at which iteration."""
    return self.iterations.schedule

  def in_parts(self, phases: Sequence[Phase], *, reverse: bool = False) -> Iterator[tuple[Phase, int]]:
    """(phase, the number of its part): the phases, each cut where a part ends, in ascending order.

    With `reverse` phases and parts are in descending order.
    """
    for phase in phases:
      for number in range(len(self.parts))[:: -1 if reverse else 1]:
        first = max(phase.first, self.parts[number].first)
        count = min(phase.first + phase.count, self.parts[number].last + 1) - first
        if count > 0:
          yield dataclasses.replace(phase, first=first, count=count), number

  @property
  def gathers(self) -> bool:
    """Whether a stage that begins a repeat replaces the weights that it keeps."""
    return any(w.gather_policy.prefetches for w in self.weights)

  @property
  def reduces(self) -> bool:
    """Whether any gradient is left as a partial sum."""
    return any(w.is_partial for w in self.weights)


class Residuals(NamedTuple):
  """The residuals that forward keeps for backward."""

  # with what they are gathered from, and the current repeat: the last one, which backward begins with
  weights: list[Weight]
  aux: PyTree  # pytree for `aux_at`
  saved: SavedOfParts  # the residuals that stages save in each iteration

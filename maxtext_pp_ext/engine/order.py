# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The order of what an iteration of backward computes: which weight's gradient, after which part of the layers.

`programs/partial.py` says what is computed. Here is every barrier between these computations.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec as P

from maxtext_pp_ext.engine import exchanges
from maxtext_pp_ext.engine.per_stage import Layout, OnDevices, together
from maxtext_pp_ext.engine.programs import one_of
from maxtext_pp_ext.engine.programs.partial import Gradient, GradientProgram
from maxtext_pp_ext.engine.programs.segments import Segment
from maxtext_pp_ext.engine.shapes import Numbers, OfRepeat
from maxtext_pp_ext.engine.weights import of_all
from maxtext_pp_ext.engine.weights.accumulators import Accumulated, Item, Operands
from maxtext_pp_ext.engine.weights.weight import there, Weight
from maxtext_pp_ext.jax_private import Literal, Var


class Saved(NamedTuple):
  """A residual that forward saved, which backward reads where it needs it first."""

  read: Callable[[jax.Array], jax.Array]  # (iteration) -> the residual
  iteration: jax.Array  # the iteration that saved it


class Done(NamedTuple):
  """What an iteration of backward has computed."""

  weights: list[Weight]  # with the sums of gradients that are partial sums
  complete: list[OfRepeat | None]  # the other gradients; None for partial sums
  others: list[jax.Array]  # outputs of the program that are no gradients
  behind: Numbers | None  # see `in_order`


class _Values:
  """The values of a program's variables, as far as it has run."""

  def __init__(self, inputs: Sequence[Var], values: Sequence[Any]):
    self._of: dict[Var, Any] = dict(zip(inputs, values, strict=True))

  def __getitem__(self, v: Var) -> Any:
    if isinstance(self._of[v], Saved):
      self._of[v] = self._of[v].read(self._of[v].iteration)
    return self._of[v]

  def array(self, v: Var | Literal) -> jax.Array:
    """The value; of one of several arrays a copy of the choice."""
    return one_of.chosen(self[v]) if isinstance(v, Var) else v.val

  def run(self, segment: Segment, beside: OnDevices | None = None) -> list[jax.Array]:
    """Runs a segment. Its last exchange of tokens waits for the results of `beside`, which are returned."""
    inputs, found = [self[v] for v in segment.inputs], [list[jax.Array]()]
    if beside is None:
      results = one_of.run(segment.program, *inputs)
    else:
      before = [None] * (exchanges.count(segment.program) - 1)
      results, found = exchanges.run(segment.program, *inputs, beside=[*before, beside])
    self._of |= zip(segment.outputs, results, strict=True)
    return found[-1]

  def crossing(self, segment: Segment) -> list[jax.Array]:
    """What waits at a segment's end; of residuals that have not been read, the iteration that is to be read."""
    values = [self._of[v] for v in segment.crossing]
    return [x.iteration if isinstance(x, Saved) else x for x in values]

  def replace(self, segment: Segment, crossed: Sequence[jax.Array]) -> None:
    for k, v in enumerate(segment.crossing):
      old = self._of[v]
      self._of[v] = old._replace(iteration=crossed[k]) if isinstance(old, Saved) else crossed[k]


@jax.named_scope("stage")
def in_order(
    program: GradientProgram,
    inputs: Sequence[jax.Array | Saved],
    weights: Sequence[Weight],
    item: Item,
    chunk: Numbers,
    behind: Numbers | None = None,
    *,
    beside_experts: bool = False,
    late: int = 0,
) -> Done:
  """Runs a backward program on all stages, and adds each gradient to its sum as soon as it is computed.

  Left to itself, the compiler (libtpu 0.0.48.1; benchmarks.workarounds gradients_at_the_end) may compute all gradients at
  the end, and hold what they need until then.

  Args:
    program: the program.
    inputs: its inputs.
    weights: the weights, with the chunks that arrive and the sums so far.
    item: the items that the stages are at.
    chunk: the number of the arriving chunks.
    behind: what gathers begin with. It is there when all that is overlapped has ended, and either the segment
      `program.gathers_after` or all that the last exchange of tokens in `program.exchanges_in` waits for.
    beside_experts: whether transfers of weights end before the last exchange of tokens in `program.exchanges_in`.
    late: the number of last segments whose gradients may be computed behind all others. They need more memory.
  """
  values, weights = _Values(program.inputs, inputs), list(weights)
  exchanges_in = program.exchanges_in if beside_experts and of_all.transferred(weights) else None
  for number, segment in enumerate(program.segments):
    if number == exchanges_in:
      weights, behind = _before_exchange(segment, values, weights, behind)
    else:
      values.run(segment)
    added: dict[int, Accumulated] = {}
    for i in segment.done:
      if program.gradients[i].is_partial:
        weights[i], operands = _behind_what_comes_before(program.gradients[i], values, weights[i])
        added[i] = weights[i].accumulate(operands, item)
        if added[i].buffers is not None and weights[i].arriving is not None:
          # Nothing reads the weight any more. So its chunk takes its place now, instead of more memory until the end.
          added[i] = added[i]._replace(buffers=_with_chunk(weights[i].added(added[i]), item, chunk))
          weights[i] = weights[i].with_(arriving=None)
    crossing = values.crossing(segment)
    if number == program.gathers_after and exchanges_in is None:
      # Gathers begin when the gradients of the iteration before are reduced, and no later than in the middle.
      tied = (crossing, added, behind)
      weights, (crossing, added, behind) = of_all.behind_barrier(weights, lambda weight: weight.overlapped, tied)
    elif crossing and number < len(program.segments) - late:  # The next layers begin when these gradients are added.
      crossing, added = jax.lax.optimization_barrier((crossing, added))
    values.replace(segment, crossing)
    for i, arrays in added.items():
      weights[i] = weights[i].added(arrays)
  complete = [None if each.complete is None else values.array(each.complete) for each in program.gradients]
  return Done(weights, complete, [values.array(v) for v in program.others], behind)


def _before_exchange(
    segment: Segment, values: _Values, weights: Sequence[Weight], behind: Numbers | None
) -> tuple[list[Weight], Numbers | None]:
  """Runs a segment, whose last exchange of tokens begins when transfers that devices compute beside have ended.

  Returns:
    (the weights, `behind`), both when these have ended and the exchange can begin.
  """
  weights, transferred = list(weights), of_all.transferred(weights)
  arrays, layouts = [getattr(weights[k], name) for k, name, _ in transferred], [layout for *_, layout in transferred]
  if behind is not None:
    arrays, layouts = [*arrays, behind], [*layouts, Layout(P(weights[0].layout.gathered[0]), 0)]
  found = values.run(segment, OnDevices.unchanged(arrays, layouts))
  for (k, name, _), array in zip(transferred, found, strict=False):
    weights[k] = weights[k].with_(**{name: array})
  return weights, None if behind is None else found[-1]


def _behind_what_comes_before(gradient: Gradient, values: _Values, weight: Weight) -> tuple[Weight, Operands]:
  """What a gradient is computed from, behind what overlaps with it and behind all that reads the weight."""
  reads = [values[v] for v in gradient.readers]
  needs = iter([values.array(v) for v in gradient.needs])
  of_roots = []
  for root in gradient.roots:
    operands = [next(needs) for _ in root.eqn.invars]
    # Tied to the smallest operand, of which a copy costs least.
    smallest = min(range(len(operands)), key=[x.size for x in operands].__getitem__)
    tied = [getattr(weight, name) for name in weight.overlapped]
    operands[smallest], tied, reads = jax.lax.optimization_barrier((operands[smallest], tied, reads))
    weight = weight.with_(**dict(zip(weight.overlapped, tied, strict=True)))
    of_roots.append(operands)
  return weight, Operands(of_roots, list(needs))


def _with_chunk(weight: Weight, item: Item, chunk: Numbers) -> jax.Array:
  with jax.named_scope("repeat"):
    (buffers,) = together(weight.mesh, [item.repeat, chunk], [weight.place()])
  return there(buffers)

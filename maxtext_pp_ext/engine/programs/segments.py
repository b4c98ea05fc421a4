# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Cuts a backward program where one block of a layer ends and the next one begins, so that gradients come before it.

Left to itself, the TPU compiler (libtpu 0.0.48.1; benchmarks.workarounds gradients_at_the_end) may compute the gradients
of all layers of a stage at the end, and keep the activations of all of them until then: 0.5 GB of 4.1 for four layers of
67 million parameters.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from maxtext_pp_ext.engine.programs.jaxprs import following, select_eqns, variables
from maxtext_pp_ext.jax_private import ClosedJaxpr, JaxprEqn, Literal, Var

# By how much the cotangents that cross a cut may exceed one activation.
_SLACK = 1.125


class Segment(NamedTuple):
  """A part of a program."""

  program: ClosedJaxpr  # its operations, (inputs) -> outputs
  inputs: tuple[Var, ...]  # variables of the whole program
  outputs: tuple[Var, ...]
  # what is read behind its end, and waits for its gradients: cotangents, or all that gradients behind it need; and
  # residuals that nothing before its end reads
  crossing: tuple[Var, ...]
  done: tuple[int, ...]  # the numbers of the gradients that it ends


def cut(
    closed: ClosedJaxpr,
    needs: Sequence[Sequence[Var | Literal]],
    cotangents: Collection[Var],
    activation_bytes: int,
    residuals: Sequence[Var] = (),
) -> tuple[Segment, ...]:
  """Cuts a program wherever the cotangent of only one activation is handed on, and a gradient's operands are there.

  Args:
    closed: the program.
    needs: for each gradient, the variables that it is computed from.
    cotangents: the program's inputs that are cotangents.
    activation_bytes: the size of the activation that layers hand on.
    residuals: the program's inputs that forward saved. A segment begins with those of its own layer. Left to itself, the
      TPU compiler (libtpu 0.0.48.1; benchmarks.workarounds residuals_of_all_layers) computes all layers' queries and keys
      in one operation, before the first gradient.

  Returns:
    The segments, in order; a program that cannot be cut is one. Each gradient is done in one of them.
  """
  jaxpr = closed.jaxpr
  own = [variables(each) for each in needs]
  operands = dict.fromkeys(v for each in own for v in each)
  others = [v for v in variables(jaxpr.outvars) if v not in operands]
  eqns = _when_needed(jaxpr.eqns, [*own, *([v] for v in others)])
  made = {v: at for at, eqn in enumerate(eqns) for v in eqn.outvars}
  there = [max((made.get(v, -1) for v in each), default=-1) for each in own]
  read = {v: at for at, eqn in enumerate(eqns) for v in variables(eqn.invars)}
  last_read = read | dict.fromkeys(others, len(eqns))
  first_read = {v: at for at, eqn in reversed(list(enumerate(eqns))) for v in variables(eqn.invars)}

  after = following(eqns, cotangents)
  passed = {v: made.get(v, -1) for v in after if v in read}  # an output that nothing reads is there to stay
  waits_for = [there[i] for i, each in enumerate(own) if each]
  ends = [*_ends(eqns, passed, waits_for, last_read, _SLACK * activation_bytes), len(eqns) - 1]
  if len(ends) == 1:
    outputs = tuple(dict.fromkeys(v for v in [*others, *operands] if v in made))
    program = select_eqns(closed, jaxpr.eqns, jaxpr.invars, outputs, consts=True)
    return (Segment(program, tuple(jaxpr.invars), outputs, (), tuple(range(len(needs)))),)
  segments, first, done = [], 0, set[int]()
  for end in ends:
    now = tuple(i for i, at in enumerate(there) if i not in done and at <= end)
    done |= set(now)
    part = eqns[first : end + 1]
    made_here = [v for eqn in part for v in eqn.outvars]
    inside = {*made_here, *jaxpr.constvars}
    inputs = tuple(dict.fromkeys(v for eqn in part for v in variables(eqn.invars) if v not in inside))
    outputs = tuple(v for v in made_here if v in operands or last_read.get(v, -1) > end)
    handed_on = [v for v, at in made.items() if v in after and at <= end < last_read.get(v, -1)]
    not_read = [v for v in residuals if first_read.get(v, -1) > end]
    crossing = (*handed_on, *not_read) if end < ends[-1] else ()
    segments.append(Segment(select_eqns(closed, part, inputs, outputs, consts=True), inputs, outputs, crossing, now))
    first = end + 1
  return tuple(segments)


def with_last_gradients(
    segments: Sequence[Segment],
    needs: Sequence[Sequence[Var | Literal]],
    others: Sequence[Var | Literal],
    sizes: Sequence[int],
) -> tuple[Segment, ...]:
  """The same segments, but the gradients of the last two are computed behind all others, each in a segment of its own.

  Where weights are gathered on the SparseCores, the largest transfers of an iteration are the last ones. The TPU compiler
  (libtpu 0.0.48.1; benchmarks.workarounds last_transfers) schedules them from the end of the iteration, each beside one
  operation, whatever that takes. So the longest products have to be there: not those of attention, which backward
  computes last, but those of the MLP, and of each the larger ones last.

  Args:
    segments: the result of `cut`, two or more.
    needs: for each gradient, the variables that it is computed from; () if it is an output of the program, and not moved.
    others: the outputs that are no gradients of segments. They are computed before.
    sizes: for each gradient the number of its elements.
  """
  *first, before, last = segments
  moved = [i for each in (last, before) for i in sorted(each.done, key=sizes.__getitem__) if needs[i]]
  operands = [dict.fromkeys(v for i in moved[at:] for v in variables(needs[i])) for at in range(len(moved) + 1)]
  nothing = select_eqns(last.program, [], [], [], consts=False)
  return (
      *first,
      before._replace(done=()),
      last._replace(crossing=tuple(dict.fromkeys([*operands[0], *variables(others)])), done=()),
      *(Segment(nothing, (), (), tuple(operands[at + 1]), (i,)) for at, i in enumerate(moved)),
  )


def _when_needed(eqns: Sequence[JaxprEqn], needs: Sequence[Sequence[Var]]) -> list[JaxprEqn]:
  """The operations in another order: nothing is computed before the first gradient, or other output, that needs it.

  Rematerialisation computes all layers of a stage again before the first gradient.
  """
  made_by = {v: at for at, eqn in enumerate(eqns) for v in eqn.outvars}
  makers = [[made_by[v] for v in variables(eqn.invars) if v in made_by] for eqn in eqns]
  there = lambda each: max((made_by.get(v, -1) for v in each), default=-1)
  order: dict[int, None] = {}
  for wanted in sorted(needs, key=there):
    found: set[int] = set()
    todo = [made_by[v] for v in wanted if v in made_by]
    while todo:
      at = todo.pop()
      if at not in order and at not in found:
        found.add(at)
        todo += makers[at]
    # First what follows from what is there, such as the cotangent of a layer's input; then what begins anew.
    follows: set[int] = set()
    for at in sorted(found):
      if makers[at] and all(maker in order or maker in follows for maker in makers[at]):
        follows.add(at)
    order |= dict.fromkeys([*sorted(follows), *sorted(found - follows)])
  return [eqns[at] for at in order]


def _ends(
    eqns: Sequence[JaxprEqn],
    made: Mapping[Var, int],
    there: Sequence[int],
    last_read: Mapping[Var, int],
    most_bytes: float,
) -> list[int]:
  """The operations behind which a segment ends: the first ones behind which no more than this is handed on again.

  Args:
    eqns: the operations.
    made: of what counts as handed on, the operation that computes it; -1 for inputs.
    there: for each gradient with operands, the operation after which they are there.
    last_read: the operation that reads a variable last.
    most_bytes: the most that is handed on.
  """
  handed_on = [0] * len(eqns)
  for v, at in made.items():
    for behind in range(max(at, 0), min(last_read.get(v, at), len(eqns))):
      handed_on[behind] += v.aval.size * v.aval.dtype.itemsize
  more = [each > most_bytes for each in handed_on]
  ends, waiting = [], any(at <= 0 for at in there)
  for at in range(1, len(eqns) - 1):
    waiting = waiting or at in there
    if waiting and more[at - 1] and not more[at] and any(more[at:]):
      ends.append(at)
      waiting = False
  return ends

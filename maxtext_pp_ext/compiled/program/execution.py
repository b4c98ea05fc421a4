# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""One run of a program: which computations run, how often, and which branches of conditionals they take.

Whatever counts or times instructions walks this tree, so a loop and a conditional mean the same to all of it:

- A loop runs its body as often as the compiler says; once, if that is not known.
- A conditional runs the branch that the program chooses in that iteration, on each device. So it counts each branch by
  the share of the devices that take it.
- Where the choice depends on data, the heaviest branch runs: the one that sends the most bytes; of those that send
  equally, the one with the most FLOPs; of those, the one with the largest results.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
import dataclasses
import functools
import itertools
from typing import NamedTuple

from maxtext_pp_ext.compiled.program import collectives, hlo, integers, products

_VALUES = frozenset({"parameter", "constant", "tuple", "get-tuple-element", "bitcast"})


class Call(NamedTuple):
  """Executions of a called computation that all do the same."""

  execution: Execution  # one of them
  times: float  # their number for each execution of the caller; of a conditional's branch the share of the devices


@dataclasses.dataclass(kw_only=True)
class Unknown:
  """Names of what could not be followed so far."""

  loops: set[str] = dataclasses.field(default_factory=set)  # those without a trip count
  # Loops with conditionals within a loop; their choices are those of one iteration of the loop around them.
  nested: set[str] = dataclasses.field(default_factory=set)
  conditionals: set[str] = dataclasses.field(default_factory=set)  # those whose choice depends on data

  @property
  def names(self) -> set[str]:
    return self.loops | self.nested | self.conditionals


class Execution:
  """Executions of one computation that do the same, and what they call.

  Attributes:
    module: the program.
    computation: what is executed.
    scope: the small integers of this execution.
    loops: number of loops around it.
    unknown: what could not be followed, of the whole program. It grows as the tree is walked.
  """

  def __init__(self, program: _Program, scope: integers.Scope, loops: int):
    self.module, self.unknown = program.module, program.unknown
    self.computation, self.scope, self.loops = scope.computation, scope, loops
    self._program = program
    self._calls: dict[str, tuple[Call, ...]] = {}

  def called(self, step: hlo.Instruction) -> tuple[Call, ...]:
    """What an instruction runs: of a loop its iterations in order, those that follow each other and are alike as one.

    A transfer on another thread, or one that is fused, is one instruction: it calls nothing. What was started is not
    called again by its `-update` and `-done`.
    """
    if step.name not in self._calls:
      self._calls[step.name] = tuple(self._called(step)) if step.called else ()
    return self._calls[step.name]

  def calls(self) -> Iterator[Call]:
    """All that one execution runs, in order."""
    for step in self.computation.instructions:
      yield from self.called(step)

  def total(self, own: Callable[[hlo.Computation, hlo.Instruction], float]) -> float:
    """Sums a figure of instructions, without what they call, over one execution and all that it runs."""

    @functools.cache
    def of(execution: Execution) -> float:
      of_steps = sum(own(execution.computation, step) for step in execution.computation.instructions)
      return of_steps + sum(call.times * of(call.execution) for call in execution.calls())

    return of(self)

  def _called(self, step: hlo.Instruction) -> Iterator[Call]:
    if step.opcode == "while":
      yield from self._iterations(step)
    elif step.opcode == "conditional":
      branches = self.module.callees(step)
      for index, share in self._branches(self.scope, step):
        # The operands follow the choice, one for each branch.
        yield self._call(self.scope.called(branches[index], step.operand_names[1 + index : 2 + index]), share)
    elif not step.opcode.endswith(("-update", "-done")) and not collectives.collective_inside(self.module, step):
      for callee in self.module.callees(step):
        yield self._call(self.scope.called(callee, step.operand_names), 1)

  def _call(self, scope: integers.Scope, times: float, loops: int = 0) -> Call:
    return Call(Execution(self._program, scope, self.loops + loops), times)

  def _iterations(self, loop: hlo.Instruction) -> Iterator[Call]:
    if (count := self.scope.trips(loop)) is None:
      self.unknown.loops.add(loop.name)
      count = 1
    (body,) = self.module.callees(loop)
    if not self._program.chooses(body.name):
      if count:
        yield self._call(next(self.scope.iterations(loop, 1)), count, loops=1)
      return
    if self.loops:
      self.unknown.nested.add(loop.name)
    alike: dict[tuple, Call] = {}
    in_order = []
    for inside in self.scope.iterations(loop, count):
      chosen = tuple(self._choices(inside))
      in_order.append(alike.setdefault(chosen, self._call(inside, 1, loops=1)))
    for call, group in itertools.groupby(in_order):
      yield Call(call.execution, len(list(group)))

  def _choices(self, scope: integers.Scope) -> Iterator[tuple[tuple[int, float], ...]]:
    for step in scope.computation.instructions:
      if step.opcode == "conditional":
        yield self._branches(scope, step)
      elif step.opcode == "call":
        (callee,) = self.module.callees(step)
        yield from self._choices(scope.called(callee, step.operand_names))

  def _branches(self, scope: integers.Scope, step: hlo.Instruction) -> tuple[tuple[int, float], ...]:
    """The branches that some device takes, each with the share of the devices that take it."""
    branches = self.module.callees(step)
    try:
      chosen = scope.value(step.operand_names[0])
    except integers.UnknownError:
      self.unknown.conditionals.add(step.name)
      return ((max(range(len(branches)), key=lambda index: self._program.weight(branches[index].name)), 1.0),)
    last = len(branches) - 1
    if chosen.dtype == bool:
      numbers = [0 if each else 1 for each in chosen.ravel().tolist()]  # the true computation comes first
    else:
      numbers = [each if 0 <= each <= last else last for each in chosen.ravel().tolist()]
    return tuple((index, count / len(numbers)) for index, count in sorted(collections.Counter(numbers).items()))


def of_module(module: hlo.Module) -> Execution:
  """The run of a program; nothing is known of its arguments."""
  return Execution(_Program(module), integers.entry(module), 0)


class _Program:
  """What all executions of a program share."""

  def __init__(self, module: hlo.Module):
    self.module, self.unknown = module, Unknown()

  @functools.cache  # noqa: B019 - lives as long as its module
  def chooses(self, name: str) -> bool:
    """Whether a computation has a conditional, in itself or in what it calls, but not in the loops within it."""
    steps = self.module.computations[name].instructions
    called = (each.name for step in steps if step.opcode == "call" for each in self.module.callees(step))
    return any(step.opcode == "conditional" for step in steps) or any(map(self.chooses, called))

  @functools.cache  # noqa: B019
  def weight(self, name: str) -> tuple[float, float, float]:
    """(bytes sent, FLOPs, bytes of results) of one run of a computation in which each conditional runs its heaviest."""
    computation = self.module.computations[name]
    total = (0.0, 0.0, 0.0)
    for step in computation.instructions:
      sent = collectives.collective_at(self.module, computation, step)
      results = 0 if step.opcode in _VALUES else sum(array.bytes for array in step.arrays)
      own = (sent[1].wire_bytes if sent else 0.0, products.dot_flops(computation, step), float(results))
      called = [] if sent else [self.weight(callee.name) for callee in self.module.callees(step)]
      called = [max(called)] if step.opcode == "conditional" and called else called
      times = (step.noted_trips or 1) if step.opcode == "while" else 1
      for times_of, weight in ((1, own), *((times, each) for each in called)):
        total = (total[0] + times_of * weight[0], total[1] + times_of * weight[1], total[2] + times_of * weight[2])
    return total

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Dependences between values of a compiled program, through loops, branches, fusions and asynchronous calls.

A value is one array: (computation, instruction, path in the instruction's tuple). Every value of an instruction depends
on every operand, except where tuples are only packed, unpacked and passed on. A received value depends on the value sent
to the same rendezvous, as all devices run the same program. Control is no dependence: a loop's condition and a branch's
choice are left out.
"""

import collections
from collections.abc import Iterable, Iterator
import itertools
import re

from maxtext_pp_ext.compiled.program import hlo

Value = tuple[str, str, tuple[int, ...]]
_WITHIN_TYPES = re.compile(r"\{[^{}]*\}|\[[^\]]*\]|/\*.*?\*/")  # layouts, sizes, and comments such as /*index=5*/
_PASSED_ON = frozenset({"opt-barrier", "copy", "bitcast", "while"})


class Dataflow:
  """The dependences of one module."""

  def __init__(self, module: hlo.Module):
    self.module = module
    self._after: dict[Value, list[Value]] = collections.defaultdict(list)
    self._before: dict[Value, list[Value]] = collections.defaultdict(list)
    edges = itertools.chain.from_iterable(itertools.starmap(self._edges, module.steps()))
    for before, after in itertools.chain(edges, self._between_slices()):
      self._after[before].append(after)
      self._before[after].append(before)

  def depending_on(self, values: Iterable[Value]) -> set[Value]:
    """The values, and all values that are computed from them."""
    return _reached(values, self._after)

  def needed_for(self, values: Iterable[Value]) -> set[Value]:
    """The values, and all values from which they are computed."""
    return _reached(values, self._before)

  def values(self, computation: str, instruction: hlo.Instruction) -> list[Value]:
    return [(computation, instruction.name, path) for path in _paths(instruction.type)]

  def operands(self, computation: hlo.Computation, instruction: hlo.Instruction) -> list[Value]:
    found = (computation.by_name.get(name) for name in instruction.operand_names)
    return [value for operand in found if operand for value in self.values(computation.name, operand)]

  def _edges(self, computation: hlo.Computation, instruction: hlo.Instruction) -> Iterator[tuple[Value, Value]]:
    where, results = computation.name, self.values(computation.name, instruction)
    names = [name for name in instruction.operand_names if name in computation.by_name]
    match instruction.opcode:
      case "parameter" | "constant":
        return
      case "tuple":
        for i, name in enumerate(names):
          for _, _, path in self.values(where, computation.by_name[name]):
            yield (where, name, path), (where, instruction.name, (i, *path))
        return
      case "get-tuple-element":
        index = instruction.attribute(r"index=(\d+)")
        if index and names:
          yield from (((where, names[0], (int(index), *path)), (w, n, path)) for w, n, path in results)
          return
    yield from self._into_calls(computation, instruction, names, results)
    operands = [self.values(where, computation.by_name[name]) for name in names]
    if instruction.opcode in _PASSED_ON and len(operands) == 1:
      yield from zip(operands[0], results, strict=False)
    elif len(operands) == len(results) > 1 and all(len(each) == 1 for each in operands):
      yield from ((operand[0], result) for operand, result in zip(operands, results, strict=True))
    elif not self.module.callees(instruction) or instruction.opcode.endswith(("-start", "-update", "-done")):
      yield from ((value, result) for each in operands for value in each for result in results)

  def _between_slices(self) -> Iterator[tuple[Value, Value]]:
    ends: dict[str, dict[str, Value]] = collections.defaultdict(dict)
    for computation, step in self.module.steps():
      if step.opcode in ("send", "recv") and step.rendezvous:
        ends[step.rendezvous][step.opcode] = self.values(computation.name, step)[0]
    yield from ((each["send"], each["recv"]) for each in ends.values() if len(each) == 2)

  def _into_calls(
      self, computation: hlo.Computation, instruction: hlo.Instruction, names: list[str], results: list[Value]
  ) -> Iterator[tuple[Value, Value]]:
    """Edges from operands to the parameters of called computations, and from their results to the instruction's."""
    where = computation.name
    for number, callee in enumerate(self.module.callees(instruction)):
      given = names[1 + number : 2 + number] if instruction.opcode == "conditional" else names
      entry = {step.operands.strip(): step for step in callee.instructions if step.opcode == "parameter"}
      for index, name in enumerate(given):
        if parameter := entry.get(str(index)):
          yield from zip(self.values(where, computation.by_name[name]), self.values(callee.name, parameter), strict=False)
      returned = self.values(callee.name, callee.root)
      if len(returned) == len(results):
        yield from zip(returned, results, strict=True)
      else:  # an asynchronous call has its operands and context among its results
        yield from ((value, result) for value in returned for result in results)
      if instruction.opcode == "while" and "0" in entry:
        yield from zip(returned, self.values(callee.name, entry["0"]), strict=False)


def _reached(values: Iterable[Value], edges: dict[Value, list[Value]]) -> set[Value]:
  found = set(values)
  waiting = list(found)
  while waiting:
    for value in edges.get(waiting.pop(), ()):
      if value not in found:
        found.add(value)
        waiting.append(value)
  return found


def _paths(type_text: str) -> list[tuple[int, ...]]:
  """The paths of the arrays in a type such as `((f32[2], s32[]), f32[3])`; [()] for an array."""
  found, at = [], []
  for token in re.findall(r"[(),]|\w+", _WITHIN_TYPES.sub("", type_text)):
    if token == "(":
      at.append(0)
    elif token == ")":
      at.pop()
    elif token == ",":
      at[-1] += 1
    else:
      found.append(tuple(at))
  return found

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Evaluates the small integers of a compiled program on all of its devices, to know which branch of a conditional runs.

A pipeline's loops decide by their iteration and their stage whether a conditional copies weights, so how often a branch
is taken cannot be read off the program without following its loop counters. Arrays have a leading axis of devices,
[partitions, …], or [1, …] where all devices have the same value. What depends on floating-point data, or on an operation
that is not known here, is unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
import contextlib
import functools
import operator
import re

import numpy as np

from maxtext_pp_ext.compiled.program import hlo

_MOST_ELEMENTS = 1 << 16
_MOST_TRIPS = 1 << 14
_PASSED_ON = frozenset({"bitcast", "copy", "copy-start", "copy-done", "reshape", "all-reduce-done"})
_COMPARE = {name: getattr(operator, name.lower()) for name in ("EQ", "NE", "LT", "LE", "GT", "GE")}


def _remainder(a: np.ndarray, b: np.ndarray) -> np.ndarray:
  """With the sign of the dividend, as in HLO."""
  return np.fmod(a, np.where(b == 0, 1, b))


def _divide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
  """Towards zero, as in HLO."""
  return (a - _remainder(a, b)) // np.where(b == 0, 1, b)


_ELEMENTWISE: dict[str, Callable[..., np.ndarray]] = {
    **{name: getattr(np, name) for name in ("add", "subtract", "multiply", "sign", "abs", "minimum", "maximum")},
    "divide": _divide,
    "remainder": _remainder,
    "negate": np.negative,
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
    "shift-left": np.left_shift,
    "shift-right-arithmetic": np.right_shift,
    "shift-right-logical": lambda a, b: (a.astype(np.int64) & 0xFFFFFFFF) >> b,
    "select": lambda pred, a, b: np.asarray(np.where(pred, a, b)),
}


class UnknownError(Exception):
  """A value does not follow from the program's constants, its loop counters and the numbers of its devices."""


class Scope:
  """One execution of a computation: what its parameters are, and what was computed of it so far.

  `parameter` gives a parameter by its number and, of a tuple, the element's index, as an array; it raises UnknownError.
  """

  def __init__(
      self, module: hlo.Module, computation: hlo.Computation, parameter: Callable[[int, int | None], np.ndarray]
  ):
    self.module, self.computation = module, computation
    self._parameter = parameter
    self._known: dict[tuple[str, int | None], np.ndarray | None] = {}

  def value(self, name: str, index: int | None = None) -> np.ndarray:
    """Of an instruction, or of one element of its tuple, [partitions, …]. Raises UnknownError."""
    key = name, index
    if key not in self._known:
      try:
        self._known[key] = self._evaluate(self.computation.by_name[name], index)
      except (UnknownError, RecursionError):  # too many iterations that nobody has asked for
        self._known[key] = None
    if (found := self._known[key]) is None:
      raise UnknownError(name)
    return found

  def called(self, callee: hlo.Computation, names: Sequence[str]) -> Scope:
    """The execution of a computation that is called with these instructions' results."""
    return Scope(self.module, callee, lambda number, index: self.value(names[number], index))

  def iterations(self, loop: hlo.Instruction, count: int) -> Iterator[Scope]:
    """The executions of a loop's body, one after the other."""
    (body,) = self.module.callees(loop)
    scope = Scope(self.module, body, lambda _, index: self.value(loop.operand_names[0], index))
    for _ in range(count):
      yield scope
      scope = Scope(self.module, body, functools.partial(_result, scope))

  def trips(self, loop: hlo.Instruction) -> int | None:
    """How often a loop runs its body: as the compiler notes, else until its condition fails. None if that is unknown."""
    if (noted := loop.noted_trips) is not None:
      return noted
    with contextlib.suppress(KeyError, UnknownError):  # a part of a program may lack the condition
      condition = self.module.computations[_attribute(loop, r"condition=%?([\w.\-]+)")]
      for count, body in enumerate(self.iterations(loop, _MOST_TRIPS)):
        goes_on = Scope(self.module, condition, body._parameter).value(condition.root.name)
        if not goes_on.any():
          return count
        if not goes_on.all():
          break
    return None

  def _evaluate(self, step: hlo.Instruction, index: int | None) -> np.ndarray:
    if step.opcode == "parameter":
      return self._parameter(int(step.operands), index)
    if step.opcode == "get-tuple-element":
      if index is not None:
        raise UnknownError(step.name)  # a tuple within a tuple
      return self.value(step.operand_names[0], int(_attribute(step, r"index=(\d+)")))
    if step.opcode == "tuple":
      if index is None:
        raise UnknownError(step.name)
      return self.value(step.operand_names[index])
    if step.opcode == "while":
      return self._unchanged(step, index)
    if step.opcode in ("fusion", "call"):
      (callee,) = self.module.callees(step)
      return _result(self.called(callee, step.operand_names), 0, index)
    if index is not None and step.opcode != "optimization-barrier":
      raise UnknownError(step.name)
    if not step.arrays or step.arrays[0].elements > _MOST_ELEMENTS:
      raise UnknownError(step.name)
    if step.opcode == "optimization-barrier":
      return self.value(step.operand_names[0], index)
    operands = [functools.partial(self.value, name) for name in step.operand_names]
    return _compute(step, step.arrays[0], operands, self.module)

  def _unchanged(self, loop: hlo.Instruction, index: int | None) -> np.ndarray:
    """What a loop hands through; what it changes is not followed to its end."""
    (body,) = self.module.callees(loop)
    root = body.root
    if index is not None and root.opcode == "tuple":
      source = body.by_name[root.operand_names[index]]
      passed = source.opcode == "get-tuple-element" and body.by_name[source.operand_names[0]].opcode == "parameter"
      if passed and int(_attribute(source, r"index=(\d+)")) == index:
        return self.value(loop.operand_names[0], index)
    raise UnknownError(loop.name)


def _result(scope: Scope, _: int, index: int | None) -> np.ndarray:
  return scope.value(scope.computation.root.name, index)


def entry(module: hlo.Module) -> Scope:
  """The execution of the program; nothing is known of its arguments."""

  def unknown(number: int, index: int | None) -> np.ndarray:
    raise UnknownError(f"argument {number}, {index}")

  return Scope(module, module.computations[module.entry], unknown)


def _compute(
    step: hlo.Instruction, array: hlo.Array, operands: Sequence[Callable[[], np.ndarray]], module: hlo.Module
) -> np.ndarray:
  shape = array.dims
  if step.opcode == "constant":
    return _constant(step, array)
  if step.opcode == "partition-id":
    return np.arange(module.partitions, dtype=np.int64)
  if step.opcode == "replica-id":
    return np.zeros(1, dtype=np.int64)
  if step.opcode == "iota":
    axis = int(_attribute(step, r"iota_dimension=(\d+)"))
    along = np.arange(shape[axis]).reshape([-1 if i == axis else 1 for i in range(len(shape))])
    return np.broadcast_to(along, (1, *shape))
  if step.opcode in _ELEMENTWISE:
    return _ELEMENTWISE[step.opcode](*(operand() for operand in operands))
  if step.opcode == "compare":
    return _COMPARE[_attribute(step, r"direction=(\w+)")](*(operand() for operand in operands))
  if step.opcode in _PASSED_ON:
    given = operands[0]()
    return given.reshape(given.shape[0], *shape)
  if step.opcode == "convert":
    return operands[0]().astype(bool if array.dtype == "pred" else float if array.is_floating else np.int64)
  if step.opcode == "broadcast":
    given, kept = operands[0](), _attribute(step, r"dimensions=\{([0-9,]*)\}").split(",")
    given = np.expand_dims(given, tuple(axis + 1 for axis in range(len(shape)) if str(axis) not in kept))
    return np.broadcast_to(given, (given.shape[0], *shape))
  if step.opcode == "slice":
    ranges = re.findall(r"\[(\d+):(\d+)(?::(\d+))?\]", _attribute(step, r"slice=\{([^}]*)\}"))
    return operands[0]()[(slice(None), *(slice(int(a), int(b), int(c or 1)) for a, b, c in ranges))]
  if step.opcode == "concatenate":
    axis = int(_attribute(step, r"dimensions=\{(\d+)\}"))
    parts = [operand() for operand in operands]
    devices = max(part.shape[0] for part in parts)
    return np.concatenate([np.broadcast_to(part, (devices, *part.shape[1:])) for part in parts], axis=axis + 1)
  if step.opcode == "dynamic-slice":
    return _dynamic_slice(operands[0](), [operand() for operand in operands[1:]], shape)
  raise UnknownError(f"{step.name}, which is a {step.opcode}")


def _constant(step: hlo.Instruction, array: hlo.Array) -> np.ndarray:
  if array.dtype not in ("pred", "f32", "bf16") and not array.dtype.startswith(("s", "u")):
    raise UnknownError(step.name)
  words = re.findall(r"true|false|-?[\d.]+(?:e[+-]?\d+)?|-?inf|nan", step.operands)
  if len(words) != array.elements:
    raise UnknownError(step.name)
  if array.dtype == "pred":
    values = np.array([word in ("true", "1") for word in words])
  else:
    values = np.array([float(word) for word in words]) if array.is_floating else np.array([int(word) for word in words])
  return values.reshape(1, *array.dims)


def _dynamic_slice(given: np.ndarray, starts: list[np.ndarray], sizes: tuple[int, ...]) -> np.ndarray:
  devices = max(given.shape[0], *(start.shape[0] for start in starts))
  given = np.broadcast_to(given, (devices, *given.shape[1:]))
  found = []
  for device in range(devices):
    at = [int(start[device if start.shape[0] > 1 else 0]) for start in starts]
    at = [min(max(i, 0), whole - size) for i, whole, size in zip(at, given.shape[1:], sizes, strict=True)]
    found.append(given[device][tuple(slice(i, i + size) for i, size in zip(at, sizes, strict=True))])
  return np.stack(found)


def _attribute(step: hlo.Instruction, pattern: str) -> str:
  if (found := step.attribute(pattern)) is None:
    raise UnknownError(f"{step.name} has no {pattern}")
  return found

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads a traced program as one device runs it: its operations, their FLOPs, and the bytes between them.

A dimension's mesh axes come from the program's sharding constraints and from its inputs, and follow the operations. So
the shares of a device are those that MaxText asks for; what XLA decides where nothing asks is taken to be whole.
"""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import enum
import math
from typing import Any

from jax.sharding import PartitionSpec as P

from maxtext_pp_ext.engine.programs.checkpoints import number_of_one_rank
from maxtext_pp_ext.engine.programs.jaxprs import inner_program
from maxtext_pp_ext.hardware.kernels import NAMES_OF_ATTENTION
from maxtext_pp_ext.jax_private import Jaxpr, JaxprEqn, Literal
from maxtext_pp_ext.sharding.resolve import mesh_axes

Axes = tuple[tuple[str, ...], ...]  # of each dimension, the mesh axes that shard it


class Kind(enum.Enum):
  """What takes time in its own way."""

  PRODUCT = enum.auto()  # of matrices
  ATTENTION = enum.auto()  # a kernel
  GROUPED = enum.auto()  # products of tokens with their experts
  EXCHANGE = enum.auto()  # tokens go to other devices
  OTHER = enum.auto()


@dataclasses.dataclass(eq=False)
class Array:
  """An array of a program: [shape] on all devices, or within a shard_map on one."""

  shape: tuple[int, ...]
  itemsize: int
  axes: Axes
  bytes: float  # on one device
  maker: "Operation | None" = None  # None of an input


@dataclasses.dataclass(eq=False)
class Operation:
  """An operation on one device."""

  kind: Kind
  operands: list[Array]
  results: list[Array]
  amount: float = 0.0  # FLOPs of products; of attention and exchanges bytes of their results
  name: str | None = None  # what `checkpoint_name` calls its result


class Reader:
  """Reads programs; `mesh` has the sizes of mesh axes."""

  def __init__(self, mesh: Mapping[str, int]):
    self.mesh = mesh
    self.operations: list[Operation] = []

  def array(self, aval: Any, axes: Axes | None = None) -> Array:
    shape, itemsize = tuple(getattr(aval, "shape", ())), getattr(getattr(aval, "dtype", None), "itemsize", 0)
    return self._array(shape, itemsize, ((),) * len(shape) if axes is None else axes)

  def read(self, jaxpr: Jaxpr, inputs: Sequence[Array]) -> list[Array]:
    """Adds the operations of a program with these inputs. Returns its outputs."""
    known = dict(zip(jaxpr.invars, inputs, strict=True)) | {v: self.array(v.aval) for v in jaxpr.constvars}
    of = lambda v: self.array(v.aval) if isinstance(v, Literal) else known[v]
    for eqn in jaxpr.eqns:
      known |= zip(eqn.outvars, self.read_eqn(eqn, [of(v) for v in eqn.invars]), strict=True)
    return [of(v) for v in jaxpr.outvars]

  def read_eqn(self, eqn: JaxprEqn, operands: list[Array]) -> list[Array]:
    """Adds an operation, or those of the program that it runs."""
    name = eqn.primitive.name
    if name == "shard_map":
      return self._shard_map(eqn, operands)
    if name == "scan":
      return self._scan(eqn, operands)
    if name not in ("while", "cond", "pallas_call") and (inner := inner_program(eqn)[0]) is not None:
      return self.read(inner, operands)
    results = [self.array(v.aval, axes) for v, axes in zip(eqn.outvars, self._axes(eqn, operands), strict=True)]
    given = eqn.params["name"] if name == "name" else None
    return self.add(_kind(eqn), operands, results, self._amount(eqn, operands, results), given)

  def add(self, kind: Kind, operands: list[Array], results: list[Array], amount=0.0, name=None) -> list[Array]:
    operation = Operation(kind, operands, results, amount, name)
    self.operations.append(operation)
    for each in results:
      each.maker = operation
    return results

  def sliced(self, stacked: Array) -> Array:
    """One of the arrays that are stacked along the first dimension."""
    return self._array(stacked.shape[1:], stacked.itemsize, stacked.axes[1:])

  def stacked(self, one: Array, length: int) -> Array:
    return Array((length, *one.shape), one.itemsize, ((), *one.axes), length * one.bytes)

  def loop(self, eqn: JaxprEqn, operands: list[Array], reader: "Reader") -> tuple[list[Array], int]:
    """Has `reader` read the body of a scan once. Returns (the loop's results, how many of them it carries)."""
    (body, _), length = inner_program(eqn), eqn.params["length"]
    carries, first = number_of_one_rank(eqn.outvars, body.outvars), number_of_one_rank(eqn.invars, body.invars)
    outs = reader.read(body, [*operands[:first], *map(self.sliced, operands[first:])])
    return [*outs[:carries], *(self.stacked(out, length) for out in outs[carries:])], carries

  def _array(self, shape: tuple[int, ...], itemsize: int, axes: Axes) -> Array:
    return Array(shape, itemsize, axes, math.prod(self._local(shape, axes)) * itemsize)

  def _local(self, shape: Sequence[int], axes: Axes) -> list[int]:
    return [math.ceil(size / math.prod(self.mesh[a] for a in of)) for size, of in zip(shape, axes, strict=True)]

  def _shard_map(self, eqn: JaxprEqn, operands: list[Array]) -> list[Array]:
    inner, _ = inner_program(eqn)
    local = [self.add(Kind.OTHER, [a], [self.array(v.aval)])[0] for v, a in zip(inner.invars, operands, strict=True)]
    found = self.read(inner, local)
    specs = [of_spec(spec, len(v.aval.shape)) for v, spec in zip(eqn.outvars, eqn.params["out_specs"], strict=True)]
    results = [self.array(v.aval, axes) for v, axes in zip(eqn.outvars, specs, strict=True)]
    return [self.add(Kind.OTHER, [a], [b])[0] for a, b in zip(found, results, strict=True)]

  def _scan(self, eqn: JaxprEqn, operands: list[Array]) -> list[Array]:
    """Adds a loop as one operation. All its results are computed from all its operands."""
    within = Reader(self.mesh)
    results, carries = self.loop(eqn, operands, within)
    results[:carries] = map(dataclasses.replace, results[:carries])
    kinds = {operation.kind for operation in within.operations} - {Kind.OTHER}
    amount = eqn.params["length"] * sum(operation.amount for operation in within.operations)
    return self.add(min(kinds, key=lambda kind: kind.value, default=Kind.OTHER), operands, results, amount)

  def _amount(self, eqn: JaxprEqn, operands: list[Array], results: list[Array]) -> float:
    if eqn.primitive.name == "dot_general":
      (contracted, _), _ = eqn.params["dimension_numbers"]
      local = self._local(operands[0].shape, operands[0].axes)
      return 2.0 * math.prod(self._local(results[0].shape, results[0].axes)) * math.prod(local[d] for d in contracted)
    if _kind(eqn) is Kind.GROUPED:  # of rows [rows, in] with matrices [groups, in, out]
      rows = [each for each in operands if len(each.shape) == 2 and each.shape[0] == results[0].shape[0]]
      return 2.0 * math.prod(self._local(results[0].shape, results[0].axes)) * (rows[0].shape[1] if rows else 0)
    # Of kernels of attention, and of exchanges, all are alike but for their results' sizes.
    return 0.0 if _kind(eqn) is Kind.OTHER else max((each.bytes for each in results), default=0.0)

  def _axes(self, eqn: JaxprEqn, operands: list[Array]) -> list[Axes]:
    name, given = eqn.primitive.name, eqn.params
    shapes = [tuple(getattr(v.aval, "shape", ())) for v in eqn.outvars]
    if not operands:
      return [((),) * len(shape) for shape in shapes]
    shape, axes = operands[0].shape, operands[0].axes
    if name == "sharding_constraint":
      spec = [*getattr(given["sharding"], "spec", ()), *[None] * len(shape)][: len(shape)]
      return [tuple(axes[k] if of is P.UNCONSTRAINED else tuple(mesh_axes(of)) for k, of in enumerate(spec))]
    if name == "transpose":
      return [tuple(axes[k] for k in given["permutation"])]
    if name == "broadcast_in_dim":
      of = {d: axes[k] for k, d in enumerate(given["broadcast_dimensions"]) if shape[k] == shapes[0][d]}
      return [tuple(of.get(d, ()) for d in range(len(shapes[0])))]
    if name == "reshape":
      return [self._reshaped(operands[0], shapes[0])]
    if name in ("squeeze", "argmax", "argmin") or (name.startswith("reduce_") and "axes" in given):
      gone = given["dimensions"] if name == "squeeze" else given["axes"]
      return [tuple(of for k, of in enumerate(axes) if k not in gone)] * len(shapes)
    if name == "dot_general":
      (lc, rc), (lb, rb) = given["dimension_numbers"]
      left, right = operands
      of_batch = [left.axes[i] or right.axes[j] for i, j in zip(lb, rb, strict=True)]
      free = [of for k, of in enumerate(left.axes) if k not in (*lc, *lb)]
      return [_distinct([*of_batch, *free, *(of for k, of in enumerate(right.axes) if k not in (*rc, *rb))])]
    return [self._of_alike(each, operands) for each in shapes]

  def _of_alike(self, shape: tuple[int, ...], operands: Iterable[Array]) -> Axes:
    """Those of operands with as many dimensions."""
    alike = [each for each in operands if len(each.shape) == len(shape)]
    of = lambda k: next((each.axes[k] for each in alike if each.axes[k] and each.shape[k] == shape[k]), ())
    return _distinct([of(k) for k in range(len(shape))])

  def _reshaped(self, array: Array, shape: tuple[int, ...]) -> Axes:
    """A group of dimensions that becomes another keeps the axes of its major one."""
    found: list[tuple[str, ...]] = [()] * len(shape)
    i = j = 0
    while i < len(array.shape) and j < len(shape):
      olds, news, old, new = [i], [j], array.shape[i], shape[j]
      while old != new:
        if old < new:
          i, old = i + 1, old * array.shape[i + 1]
          olds.append(i)
        else:
          j, new = j + 1, new * shape[j + 1]
          news.append(j)
      of = next((array.axes[k] for k in olds if array.shape[k] != 1), ())
      major = next((k for k in news if shape[k] != 1), news[0])
      if shape[major] % math.prod(self.mesh[a] for a in of) == 0:
        found[major] = of
      i, j = i + 1, j + 1
    return tuple(found)


def _kind(eqn: JaxprEqn) -> Kind:
  name = eqn.primitive.name
  if name == "dot_general":
    return Kind.PRODUCT
  if name == "pallas_call":
    # Of these layers' kernels those of grouped products have no name.
    called = f"{eqn.params.get('name')} {eqn.source_info.name_stack}"
    return Kind.ATTENTION if any(word in called for word in NAMES_OF_ATTENTION) else Kind.GROUPED
  if name.startswith("ragged_dot"):
    return Kind.GROUPED
  return Kind.EXCHANGE if name in ("all_to_all", "ragged_all_to_all") else Kind.OTHER


def between(forward: Iterable[Operation], x: Array) -> dict[Array, float]:
  """The bytes of what products and kernels read and write, other than weights."""
  on_input = {x}
  for each in forward:
    if not on_input.isdisjoint(each.operands):
      on_input.update(each.results)
  heavy = (each for each in forward if each.kind is not Kind.OTHER)
  return {array: array.bytes for each in heavy for array in (*each.operands, *each.results) if array in on_input}


def kind_of_maker(array: Array) -> Kind | None:
  """What computes an array, but for operations on it alone, such as casts; None of an input."""
  while array.maker and array.maker.kind is Kind.OTHER and len(array.maker.operands) == 1:
    (array,) = array.maker.operands
  return None if array.maker is None else array.maker.kind


def of_spec(spec: Any, rank: int) -> Axes:
  return tuple(tuple(mesh_axes(of)) for of in [*spec, *[None] * rank][:rank])


def _distinct(axes: Iterable[tuple[str, ...]]) -> Axes:
  """Each mesh axis at its first dimension only."""
  seen = set[str]()
  found = []
  for of in axes:
    found.append(tuple(axis for axis in of if axis not in seen))
    seen |= set(of)
  return tuple(found)

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads a traced program as one device runs it: its operations, their FLOPs, and the bytes between them.

A dimension's mesh axes come from the program's sharding constraints and from its inputs, and follow the operations. So
the shares of a device are those that MaxText asks for; what XLA decides where nothing asks is taken to be whole.

Where an operation needs other axes than its operands have, values are gathered or exchanged. Where it contracts or sums
along a dimension that is sharded, its results are reduced: scattered, if the next constraint asks for these axes, else to
all devices (Xu et al., "GSPMD", 2021, section 3.5).
"""

import collections
from collections.abc import Collection, Iterable, Mapping, Sequence
import dataclasses
import enum
import math
import types
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec as P

from maxtext_pp_ext.engine.programs.checkpoints import number_of_one_rank
from maxtext_pp_ext.engine.programs.jaxprs import inner_program
from maxtext_pp_ext.engine.programs.primitives import is_call
from maxtext_pp_ext.hardware.kernels import NAMES_OF_ATTENTION
from maxtext_pp_ext.jax_private import Jaxpr, JaxprEqn, Literal
from maxtext_pp_ext.sharding.resolve import mesh_axes

Axes = tuple[tuple[str, ...], ...]  # of each dimension, the mesh axes that shard it
# JAX's collectives: how many times a device sends the larger of its operand and result.
_CONSTRAINTS = {"sharding_constraint": "sharding", "reshard": "dst_sharding"}  # and the parameter with the sharding
_COLLECTIVES = dict.fromkeys(("psum", "psum_invariant", "pmax"), 2)
_COLLECTIVES |= dict.fromkeys(("all_gather", "all_gather_invariant", "reduce_scatter"), 1)


class Kind(enum.Enum):
  """What takes time in its own way."""

  PRODUCT = enum.auto()  # of matrices
  ATTENTION = enum.auto()  # a kernel
  GROUPED = enum.auto()  # products of tokens with their experts
  EXCHANGE = enum.auto()  # tokens go to other devices
  OTHER = enum.auto()


class Why(enum.Enum):
  """Why a value is sent."""

  WHOLE = enum.auto()  # a product reads it whole
  SUMMED = enum.auto()  # it is the sum of what devices have computed of it
  MOVED = enum.auto()  # the program asks for it elsewhere


class Over(NamedTuple):
  """How values are sent between devices, other than tokens to experts."""

  axes: tuple[str, ...]  # between devices along these mesh axes
  why: Why


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
  sends: Mapping["Over", float] = dataclasses.field(default_factory=dict)  # bytes that a device sends for it


class Reader:
  """Reads programs; `mesh` has the sizes of mesh axes, and `within` those over which what is sent counts."""

  def __init__(self, mesh: Mapping[str, int], within: Collection[str] = ()):
    self.mesh, self.within = mesh, frozenset(axis for axis in within if mesh[axis] > 1)
    self.operations: list[Operation] = []
    self._whole: dict[tuple[Array, frozenset[str]], Array] = {}  # what is gathered for one product serves others

  def array(self, aval: Any, axes: Axes | None = None) -> Array:
    shape, itemsize = tuple(getattr(aval, "shape", ())), getattr(getattr(aval, "dtype", None), "itemsize", 0)
    return self._array(shape, itemsize, ((),) * len(shape) if axes is None else axes)

  def read(self, jaxpr: Jaxpr, inputs: Sequence[Array], asked: Sequence[Axes | None] = ()) -> list[Array]:
    """Adds the operations of a program with these inputs. Returns its outputs, for which these axes may be asked."""
    known = dict(zip(jaxpr.invars, inputs, strict=True)) | {v: self.array(v.aval) for v in jaxpr.constvars}
    of = lambda v: self.array(v.aval) if isinstance(v, Literal) else known[v]
    asks = _asks(jaxpr, asked)
    for eqn in jaxpr.eqns:
      results = self.read_eqn(eqn, [of(v) for v in eqn.invars], [asks.get(v) for v in eqn.outvars])
      known |= zip(eqn.outvars, results, strict=True)
    return [of(v) for v in jaxpr.outvars]

  def read_eqn(self, eqn: JaxprEqn, operands: list[Array], asked: Sequence[Axes | None]) -> list[Array]:
    """Adds an operation, or those of the program that it runs. `asked` are the axes that are asked for its results."""
    name = eqn.primitive.name
    if name == "shard_map":
      return self._shard_map(eqn, operands)
    if name == "scan":
      return self._scan(eqn, operands)
    if name not in ("while", "cond", "pallas_call") and (inner := inner_program(eqn)[0]) is not None:
      return self.read(inner, operands, asked)
    if name == "dot_general" and self.within:
      operands = self._whole_operands(eqn, operands, asked[0])
    results = [self.array(v.aval, axes) for v, axes in zip(eqn.outvars, self._axes(eqn, operands), strict=True)]
    if name in _CONSTRAINTS and results[0].axes == operands[0].axes:
      return operands
    amount = self._amount(eqn, operands, results)
    if summed := self._summed(eqn, operands):
      results[0] = self.array(eqn.outvars[0].aval, _scattered(results[0], summed, asked[0]))
      sends = self._reduces(summed, results[0])
    else:
      sends = self._sends(eqn, operands, results)
    given = eqn.params["name"] if name == "name" else None
    return self.add(_kind(eqn), operands, results, amount, given, sends)

  def add(
      self,
      kind: Kind,
      operands: list[Array],
      results: list[Array],
      amount: float = 0.0,
      name: str | None = None,
      sends: Mapping[Over, float] = types.MappingProxyType({}),
  ) -> list[Array]:
    operation = Operation(kind, operands, results, amount, name, sends)
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
    local = []
    for v, spec, given in zip(inner.invars, eqn.params["in_specs"], operands, strict=True):
      own = self.array(v.aval)
      local += self.add(Kind.OTHER, [given], [own], sends=self._moves(given, of_spec(spec, len(given.shape)), own.bytes))
    found = self.read(inner, local)
    specs = [of_spec(spec, len(v.aval.shape)) for v, spec in zip(eqn.outvars, eqn.params["out_specs"], strict=True)]
    results = [self.array(v.aval, axes) for v, axes in zip(eqn.outvars, specs, strict=True)]
    return [self.add(Kind.OTHER, [a], [b])[0] for a, b in zip(found, results, strict=True)]

  def _scan(self, eqn: JaxprEqn, operands: list[Array]) -> list[Array]:
    """Adds a loop as one operation. All its results are computed from all its operands."""
    within = Reader(self.mesh, self.within)
    results, carries = self.loop(eqn, operands, within)
    results[:carries] = map(dataclasses.replace, results[:carries])
    kinds = {operation.kind for operation in within.operations} - {Kind.OTHER}
    length, sends = eqn.params["length"], collections.Counter[Over]()
    for operation in within.operations:
      sends.update(operation.sends)
    kind = min(kinds, key=lambda kind: kind.value, default=Kind.OTHER)
    amount = length * sum(operation.amount for operation in within.operations)
    return self.add(kind, operands, results, amount, None, {over: length * size for over, size in sends.items()})

  def _whole_operands(self, eqn: JaxprEqn, operands: list[Array], asked: Axes | None) -> list[Array]:
    """The operands of a product, gathered along dimensions whose mesh axes shard another dimension of the other operand.

    Of an axis that shards a free dimension of both, one is gathered: the one whose dimension shall not have it.
    """
    contracted, batch = eqn.params["dimension_numbers"]
    axes = lambda k, of: {axis for d in of for axis in operands[k].axes[d]} & self.within
    free = [[d for d in range(len(operands[k].shape)) if d not in (*contracted[k], *batch[k])] for k in (0, 1)]
    both = axes(0, free[0]) & axes(1, free[1])
    behind = len(batch[0]) + len(free[0])  # in the result come batch, then the left one's free dimensions
    of_right = both & {axis for of in (asked or ())[behind:] for axis in of}
    whole = [axes(k, (*contracted[k], *batch[k])) & axes(1 - k, free[1 - k]) for k in (0, 1)]
    return [
        self._gathered(operands[0], frozenset(whole[0] | of_right)),
        self._gathered(operands[1], frozenset(whole[1] | (both - of_right))),
    ]

  def _gathered(self, array: Array, over: frozenset[str]) -> Array:
    if not over:
      return array
    if (array, over) not in self._whole:
      axes = tuple(tuple(axis for axis in of if axis not in over) for of in array.axes)
      whole = self._array(array.shape, array.itemsize, axes)
      sends = {Over(tuple(sorted(over)), Why.WHOLE): whole.bytes - array.bytes}
      self._whole[array, over] = self.add(Kind.OTHER, [array], [whole], sends=sends)[0]
    return self._whole[array, over]

  def _summed(self, eqn: JaxprEqn, operands: list[Array]) -> frozenset[str]:
    """The mesh axes over which the result of an operation on parts of its operands has to be summed."""
    if eqn.primitive.name == "dot_general":
      contracted, _ = eqn.params["dimension_numbers"]
      axes = {axis for array, of in zip(operands, contracted, strict=True) for k in of for axis in array.axes[k]}
    elif eqn.primitive.name in ("reduce_sum", "reduce_max", "reduce_min"):
      axes = {axis for k in eqn.params["axes"] for axis in operands[0].axes[k]}
    elif eqn.primitive.name == "gather":  # rows of a table; each device has some of them
      axes = {axis for k in eqn.params["dimension_numbers"].start_index_map for axis in operands[0].axes[k]}
    else:
      axes = set()
    return self.within & axes

  def _reduces(self, over: frozenset[str], result: Array) -> dict[Over, float]:
    """What is sent to sum results over axes: along those that shard the sum it is scattered, along others all-reduced."""
    scattered = over.intersection(axis for of in result.axes for axis in of)
    parts = math.prod(self.mesh[axis] for axis in scattered)
    sent = result.bytes * (parts - 1 + 2 * (1 - 1 / math.prod(self.mesh[axis] for axis in over - scattered)))
    return {Over(tuple(sorted(over)), Why.SUMMED): sent}

  def _moves(self, array: Array, axes: Axes, size: float) -> dict[Over, float]:
    """What is sent to have an array sharded by other axes; of these a device has so many bytes then."""
    before, after = ({axis: k for k, of in enumerate(each) for axis in of} for each in (array.axes, axes))
    moved = {axis for axis, k in before.items() if axis in self.within and after.get(axis) != k}
    if not moved:
      return {}
    return {Over(tuple(sorted(moved)), Why.MOVED): size * (1 - 1 / math.prod(self.mesh[axis] for axis in moved))}

  def _sends(self, eqn: JaxprEqn, operands: list[Array], results: list[Array]) -> dict[Over, float]:
    """What is sent for a sharding constraint, or for a collective that the program has itself."""
    name = eqn.primitive.name
    if name in _CONSTRAINTS:
      return self._moves(operands[0], results[0].axes, results[0].bytes)
    if name not in _COLLECTIVES:
      return {}
    given = eqn.params.get("axis_name", eqn.params.get("axes", ()))
    axes = tuple(axis for axis in mesh_axes(given) if axis in self.within)
    if not axes:
      return {}
    times, size = _COLLECTIVES[name], max(sum(each.bytes for each in side) for side in (operands, results))
    return {Over(axes, Why.MOVED): times * size * (1 - 1 / math.prod(self.mesh[axis] for axis in axes))}

  def _amount(self, eqn: JaxprEqn, operands: list[Array], results: list[Array]) -> float:
    if eqn.primitive.name == "dot_general":
      contracted, _ = eqn.params["dimension_numbers"]
      locals_ = [self._local(each.shape, each.axes) for each in operands]
      depth = math.prod(min(locals_[0][i], locals_[1][j]) for i, j in zip(*contracted, strict=True))
      return 2.0 * math.prod(self._local(results[0].shape, results[0].axes)) * depth
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
    if name in _CONSTRAINTS:
      spec = [*getattr(given[_CONSTRAINTS[name]], "spec", ()), *[None] * len(shape)][: len(shape)]
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


def _asks(jaxpr: Jaxpr, asked: Sequence[Axes | None]) -> dict[Any, Axes]:
  """Returns the axes that values are asked to have: results by `asked`, others by the next sharding constraint."""
  found = {v: axes for v, axes in zip(jaxpr.outvars, asked, strict=False) if axes and not isinstance(v, Literal)}

  def note(value: Any, axes: Axes | None, *, first: bool = False) -> None:
    if axes and not isinstance(value, Literal) and len(axes) == len(value.aval.shape) and not (first and value in found):
      found[value] = axes

  for eqn in reversed(jaxpr.eqns):
    if (name := eqn.primitive.name) in _CONSTRAINTS:
      given = getattr(eqn.params[_CONSTRAINTS[name]], "spec", ())
      spec = [None if of is P.UNCONSTRAINED else of for of in given]
      note(eqn.invars[0], of_spec(spec, len(eqn.outvars[0].aval.shape)))
    elif name == "scan" or is_call(eqn):
      inner, _ = inner_program(eqn)
      of_inner = _asks(inner, [found.get(v) for v in eqn.outvars] if is_call(eqn) else ())
      for value, v in zip(eqn.invars, inner.invars, strict=True):
        note(value, of_inner.get(v))
    elif name == "transpose" and (axes := found.get(eqn.outvars[0])):
      note(eqn.invars[0], tuple(axes[eqn.params["permutation"].index(k)] for k in range(len(axes))), first=True)
    elif name == "dot_general" and (axes := found.get(eqn.outvars[0])):
      for value, of_value in zip(eqn.invars, _asked_of_operands(eqn, axes), strict=True):
        note(value, of_value, first=True)
    elif len(eqn.outvars) == 1 and _kind(eqn) is Kind.OTHER:  # casts, norms, biases
      for value in eqn.invars:
        if value.aval.shape == eqn.outvars[0].aval.shape:
          note(value, found.get(eqn.outvars[0]), first=True)
  return found


def _asked_of_operands(eqn: JaxprEqn, asked: Axes) -> list[Axes | None]:
  """The axes asked for the operands of a product that contracts nothing, such as that of a norm with its scale."""
  (contracted, _), batch = eqn.params["dimension_numbers"]
  if contracted:
    return [None, None]
  found, at = list[Axes | None](), len(batch[0])
  for value, of_batch in zip(eqn.invars, batch, strict=True):  # in the result come batch, then each operand's others
    others = [k for k in range(len(value.aval.shape)) if k not in of_batch]
    axes = dict(zip((*of_batch, *others), (*asked[: len(of_batch)], *asked[at:]), strict=False))
    found.append(tuple(axes[k] for k in sorted(axes)))
    at += len(others)
  return found


def _scattered(result: Array, over: Collection[str], asked: Axes | None) -> Axes:
  """The axes of a sum: those that are asked for, as far as it is summed over them."""
  of = asked or ((),) * len(result.axes)
  new = [tuple(axis for axis in each if axis in over) for each in of]
  return tuple((*own, *added) for own, added in zip(result.axes, new, strict=True))


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

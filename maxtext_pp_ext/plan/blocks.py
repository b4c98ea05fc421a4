# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Blocks of layers: what one keeps for backward, computes again, and sends, for many remat policies at once."""

import collections
from collections.abc import Iterable, Mapping, Sequence
import copy
import enum
import functools

import numpy as np

from maxtext_pp_ext.plan.operations import Array, Kind, Operation, Over

Cases = np.ndarray  # a value, or a truth, for each of several policies


class Again(enum.Enum):
  """What a policy decides beside which kinds of operations backward computes again."""

  BETWEEN = enum.auto()  # reads and writes, of what is between products
  DISPATCHES = enum.auto()  # tokens that go to experts
  COMBINES = enum.auto()  # their results that come back
  # What kernels compute and a policy keeps is copied to where it is kept, and back for backward. What products compute is
  # copied by MaxText's own loop; ours has products write it there.
  KEPT_OF_KERNELS = enum.auto()
  KEPT_OF_PRODUCTS = enum.auto()


What = Kind | Again | Over  # of what there is so much
# Of each of several policies: bytes that are kept by name, and amounts that are computed again by kind.
Under = tuple[dict[str | None, Cases], dict[What, Cases]]
Amounts = collections.Counter[What]  # how much of each kind, fractions included
_KEPT_OF = dict.fromkeys((Kind.ATTENTION, Kind.GROUPED), Again.KEPT_OF_KERNELS) | {Kind.PRODUCT: Again.KEPT_OF_PRODUCTS}


class Block:
  """A layer, or a cycle of layers, that is rematerialised together."""

  def __init__(
      self,
      forward: Sequence[Operation],
      needs: Sequence[Array],
      x: Array,
      *,
      offloads: bool = True,
      keeps_all: bool = False,
  ):
    self.offloads = offloads  # whether what a policy offloads goes to the host's memory; else it stays on the device
    # Whether nothing is computed again, whatever the policy says, but what is fused into products and kernels.
    self._keeps_all = keeps_all
    self._needs, self._x = needs, x
    of_between = _between(forward, x)
    products = [array for each in forward if each.kind is Kind.PRODUCT for array in (*each.operands, *each.results)]
    self._between = sum(of_between.values())  # bytes of what products and kernels read and write, but weights
    # Bytes that its products read and write: activations, and weights.
    self.moved = sum(array.bytes for array in products if array in of_between)
    self.weights = sum(array.bytes for array in products if array not in of_between)
    self.normalised = sum(map(_normalised, forward))  # values that products compute and norms then divide
    exchanges = [each for each in forward if each.kind is Kind.EXCHANGE]
    back = exchanges[len(exchanges) // 2 :]
    self.whole = Amounts()
    # Each with what it costs where it runs. A name costs something where its value is kept.
    self._forward: list[tuple[Operation, dict[What, float]]] = []
    for each in forward:
      amounts: dict[What, float] = {each.kind: each.amount} | dict[What, float](each.sends.items())
      if each.kind is Kind.EXCHANGE:
        amounts[Again.COMBINES if each in back else Again.DISPATCHES] = each.amount
      amounts[Again.BETWEEN] = sum((of_between.get(result, 0.0) for result in each.results), 0.0)
      self.whole.update(amounts)
      if each.name:
        named, kind = each.results[0], _kind_of_maker(each.results[0])
        amounts = {_KEPT_OF[kind]: named.bytes / named.itemsize} if kind in _KEPT_OF else {}
        self.whole.update(amounts)
      self._forward.append((each, {kind: amount for kind, amount in amounts.items() if amount}))

  def in_loop(self) -> "Block":
    """The same block where it is rematerialised as the policy says."""
    found = copy.copy(self)
    found._keeps_all = False
    return found

  @property
  def names(self) -> Sequence[str]:
    """The names of what forward computes, in its order."""
    return list(dict.fromkeys(each.name for each, _ in self._forward if each.name))

  def under(self, keeps: Mapping[str, Cases], size: int) -> Under:
    """({name: bytes that are kept}, {kind: amount that is computed again}) of `size` policies; the input has no name.

    From what backward needs it goes back through forward, as far as nothing is kept.
    """
    if self._keeps_all:
      return dict.fromkeys(self.names, np.zeros(size)) | {None: np.full(size, self._between)}, {}
    wanted = dict.fromkeys(self._needs, np.ones(size, bool))
    kept: dict[str | None, Cases] = {name: np.zeros(size) for name in self.names}
    again = dict[What, Cases]()
    for each, amounts in reversed(self._forward):
      if not (read := [wanted[result] for result in each.results if result in wanted]):
        continue
      counts = runs = functools.reduce(np.logical_or, read)
      if each.name:
        counts, runs = runs & keeps[each.name], runs & ~keeps[each.name]
        kept[each.name] = kept[each.name] + counts * each.results[0].bytes
      for kind, amount in amounts.items():
        again[kind] = again.get(kind, 0.0) + counts * amount
      for operand in each.operands:
        if (before := wanted.get(operand)) is not runs:  # most often it is the same array
          wanted[operand] = runs if before is None else before | runs
    return kept | {None: wanted.get(self._x, np.zeros(size, bool)) * self._x.bytes}, again


class Mixed(Block):
  """A block whose amounts are those of two that compute the same, each to its share."""

  def __init__(self, one: Block, other: Block, share: float):
    """`share` is that of the other one."""
    self._of = ((one, 1 - share), (other, share))
    mean = lambda value: sum(part * value(block) for block, part in self._of)
    self.offloads = one.offloads and other.offloads
    self.moved, self.weights = mean(lambda block: block.moved), mean(lambda block: block.weights)
    self.normalised = mean(lambda block: block.normalised)
    self.whole = Amounts()
    for block, part in self._of:
      self.whole.update({kind: part * amount for kind, amount in block.whole.items()})

  @property
  def names(self) -> Sequence[str]:
    return list(dict.fromkeys(name for block, _ in self._of for name in block.names))

  def under(self, keeps: Mapping[str, Cases], size: int) -> Under:
    found = [(part, *block.under(keeps, size)) for block, part in self._of]
    return sums((part, kept) for part, kept, _ in found), sums((part, again) for part, _, again in found)


def sums[K](weighted: Iterable[tuple[float, Mapping[K, Cases]]]) -> dict[K, Cases]:
  found = dict[K, Cases]()
  for part, amounts in weighted:
    for what, amount in amounts.items():
      found[what] = found.get(what, 0.0) + part * amount
  return found


def _between(forward: Iterable[Operation], x: Array) -> dict[Array, float]:
  """The bytes of what products and kernels read and write, other than weights."""
  on_input = {x}
  for each in forward:
    if not on_input.isdisjoint(each.operands):
      on_input.update(each.results)
  heavy = (each for each in forward if each.kind is not Kind.OTHER)
  return {array: array.bytes for each in heavy for array in (*each.operands, *each.results) if array in on_input}


def _normalised(operation: Operation) -> float:
  """The number of values that an operation adds up along their last dimension, if a product computed them.

  These are norms of queries and keys, and norms behind attention or an MLP, unless a bias or RoPE comes before them. A
  router's softmax is among them. Norms of the residual stream, which is a sum, are not.
  """
  if operation.kind is not Kind.OTHER or len(set(operation.operands)) != 1:
    return 0.0
  array, result = operation.operands[0], operation.results[0]
  is_sum = len(array.shape) > 2 and result.shape == array.shape[:-1]
  return array.bytes / array.itemsize if is_sum and _kind_of_maker(array) is Kind.PRODUCT else 0.0


def _kind_of_maker(array: Array) -> Kind | None:
  """What computes an array, but for operations on it alone, such as casts; None of an input."""
  while array.maker and array.maker.kind is Kind.OTHER and len(set(array.maker.operands)) == 1:
    array = array.maker.operands[0]
  return None if array.maker is None else array.maker.kind

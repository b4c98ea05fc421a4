# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Blocks of layers: what one keeps for backward, computes again, and sends, for many remat policies at once."""

import collections
from collections.abc import Iterable, Mapping, Sequence
import enum
import itertools

import numpy as np

from maxtext_pp_ext.plan.operations import Array, between, Kind, kind_of_maker, Operation, Over

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
_KEPT_OF = dict.fromkeys((Kind.ATTENTION, Kind.GROUPED), Again.KEPT_OF_KERNELS) | {Kind.PRODUCT: Again.KEPT_OF_PRODUCTS}


class Amounts(collections.defaultdict[What, float]):
  """How much of each kind."""

  def __init__(self):
    super().__init__(float)

  def add(self, others: Mapping[What, float], times: float = 1.0) -> None:
    for kind, amount in others.items():
      self[kind] += times * amount


class Block:
  """A layer, or a cycle of layers, that is rematerialised together.

  What is computed again is found for many policies at once. A region is what computes a value from named ones: one for
  what backward needs, and one for each named value. The region of a named value runs if another one that runs reads the
  value, and the policy does not keep it.
  """

  def __init__(self, forward: Sequence[Operation], needs: Sequence[Array], x: Array, *, offloads: bool = True):
    self.offloads = offloads  # whether what a policy offloads goes to the host's memory; else it stays on the device
    named = [each for each in forward if each.name]
    # The last ones first.
    self._stops: dict[Array, str | None] = {each.results[0]: each.name for each in reversed(named)} | {x: None}
    starts: dict[Array | None, Sequence[Array]] = {None: [each for each in needs if each not in self._stops]}
    starts |= {each.results[0]: each.operands for each in named}
    self._needed = {each for each in needs if each in self._stops}
    self._reads, of = dict[Array | None, set[Array]](), dict[Operation, set[Array | None]]()
    for region, arrays in starts.items():
      operations, self._reads[region] = self._walk(arrays)
      for each in operations:
        of.setdefault(each, set()).add(region)
    of_between = between(forward, x)
    products = [array for each in forward if each.kind is Kind.PRODUCT for array in (*each.operands, *each.results)]
    # Bytes that its products read and write: activations, and weights.
    self.moved = sum(array.bytes for array in products if array in of_between)
    self.weights = sum(array.bytes for array in products if array not in of_between)
    made = {array: kind_of_maker(array) for array, name in self._stops.items() if name}
    self._copied = {a: (_KEPT_OF[kind], a.bytes / a.itemsize) for a, kind in made.items() if kind in _KEPT_OF}
    # Operations that the same regions run: their amounts.
    of_regions = collections.defaultdict[frozenset[Array | None], Amounts](Amounts)
    exchanges = [each for each in forward if each.kind is Kind.EXCHANGE]
    self.whole = Amounts()
    for kind, values in self._copied.values():
      self.whole[kind] += values
    for each in forward:
      amounts: dict[What, float] = {each.kind: each.amount} | dict[What, float](each.sends.items())
      if each.kind is Kind.EXCHANGE:
        back = exchanges.index(each) >= len(exchanges) // 2
        amounts[Again.COMBINES if back else Again.DISPATCHES] = each.amount
      amounts[Again.BETWEEN] = sum((of_between.get(result, 0.0) for result in each.results), 0.0)
      for into in (self.whole, *([of_regions[frozenset(of[each])]] if each in of else [])):
        into.add(amounts)
    self._regions, self._kinds = list(of_regions), list(dict.fromkeys(itertools.chain(*of_regions.values())))
    # [kind, regions]
    self._amounts = np.array([[each.get(kind, 0.0) for each in of_regions.values()] for kind in self._kinds])
    self._under: dict[tuple, Under] = {}

  @property
  def names(self) -> frozenset[str]:
    """The names that stand on the way to what backward needs."""
    return frozenset(name for name in self._stops.values() if name)

  def under(self, keeps: Mapping[str, Cases], size: int) -> Under:
    """({name: bytes that are kept}, {kind: amount that is computed again}) of `size` policies; the input has no name."""
    policies = size, *(keeps[name].tobytes() for name in sorted(self.names))
    if policies not in self._under:  # a plan asks for the same ones again, with other blocks beside this one
      self._under = {policies: self._found_under(keeps, size)}
    return self._under[policies]

  def _found_under(self, keeps: Mapping[str, Cases], size: int) -> Under:
    runs: dict[Array | None, Cases] = {None: np.ones(size, bool)}
    kept, again = dict[str | None, Cases](), dict[What, Cases]()
    for array, name in self._stops.items():
      reached = np.full(size, array in self._needed)
      for region, running in runs.items():
        if array in self._reads[region]:
          reached = reached | running
      stays = reached & keeps[name] if name else reached
      kept[name] = kept.get(name, 0.0) + stays * array.bytes
      if array in self._copied:
        of, values = self._copied[array]
        again[of] = again.get(of, 0.0) + stays * values
      if name:
        runs[array] = reached & ~keeps[name]
    if self._kinds:
      running = np.array([np.any([runs[region] for region in regions], axis=0) for regions in self._regions])
      for kind, amounts in zip(self._kinds, self._amounts @ running, strict=True):
        again[kind] = again.get(kind, 0.0) + amounts
    return kept, again

  def _walk(self, arrays: Iterable[Array]) -> tuple[set[Operation], set[Array]]:
    """(the operations that compute these arrays from named ones, the named ones that they read)."""
    operations, read, waiting = set[Operation](), set[Array](), list(arrays)
    while waiting:
      array = waiting.pop()
      if array in self._stops:
        read.add(array)
      elif array.maker and array.maker not in operations:
        operations.add(array.maker)
        waiting += array.maker.operands
    return operations, read


class Mixed(Block):
  """A block whose amounts are those of two that compute the same, each to its share."""

  def __init__(self, one: Block, other: Block, share: float):
    """`share` is that of the other one."""
    self._of = ((one, 1 - share), (other, share))
    mean = lambda value: sum(part * value(block) for block, part in self._of)
    self.offloads = one.offloads and other.offloads
    self.moved, self.weights = mean(lambda block: block.moved), mean(lambda block: block.weights)
    self.whole = Amounts()
    for block, part in self._of:
      self.whole.add(block.whole, part)

  @property
  def names(self) -> frozenset[str]:
    return frozenset().union(*(block.names for block, _ in self._of))

  def under(self, keeps: Mapping[str, Cases], size: int) -> Under:
    found = [(part, *block.under(keeps, size)) for block, part in self._of]
    return sums((part, kept) for part, kept, _ in found), sums((part, again) for part, _, again in found)


def sums[K](weighted: Iterable[tuple[float, Mapping[K, Cases]]]) -> dict[K, Cases]:
  found = dict[K, Cases]()
  for part, amounts in weighted:
    for what, amount in amounts.items():
      found[what] = found.get(what, 0.0) + part * amount
  return found

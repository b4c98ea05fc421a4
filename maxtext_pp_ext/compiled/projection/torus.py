# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Which links of the chips' torus a collective uses, and for how long at least.

Chips of a slice are connected in a grid of two (v5e, v6e) or three dimensions (v4, v5p), each chip with a link to its
neighbours in both directions. An axis is closed to a ring only where it is long enough (`hardware.torus.closed`). The
times are those of bandwidth-optimal algorithms that use both directions and all axes that the group spans:

- all-gather, reduce-scatter: a device receives (g−1)/g of the whole array; over a ring through two links at a time, and
  at the end of a line through one.
- all-reduce: both of them.
- all-to-all: of what a half of an axis sends, half goes to the other half, through one link (line) or two (ring).
- permute: an array goes one way; a link is shared by all that go over it in its direction.

Source: "How to Scale Your Model", jax-ml.github.io/scaling-book/tpus and /sharding.
"""

import collections
from collections.abc import Iterable, Iterator, Mapping, Sequence
import dataclasses
import itertools
import math

from maxtext_pp_ext.hardware.torus import closed

Coordinates = tuple[int, ...]
AXES, DIRECTIONS = "xyz", "+-"
DCN = "data-centre network"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
  """Where a partition of the program runs."""

  slice: int  # the number of its slice
  at: Coordinates  # coordinates of its chip in the slice's torus, x, y(, z)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Route:
  """What a transfer occupies."""

  lanes: tuple[str, ...]  # the links of a torus axis in one direction, such as "x+", or the data-centre network
  rate: float  # bytes per second and device, of the array that is gathered, reduced or sent
  hops: int  # links from end to end, for latency


class Torus:
  """The devices of a program, partition by partition.

  Args:
    devices: in the order of the program's partitions.
    link: bytes per second of one link in one direction.
    network: bytes per second of a chip to other slices.
    dimensions: of the chip's torus, 2 or 3; further coordinates are 0.
  """

  def __init__(self, devices: Sequence[Device], *, link: float, network: float, dimensions: int):
    self.devices, self._link, self._network = tuple(devices), link, network
    self.shape = tuple(1 + max(device.at[axis] for device in devices) for axis in range(dimensions))
    self._closed = closed(self.shape)

  def route(self, group: Sequence[int]) -> Route:
    """For a gather, reduce-scatter or all-reduce among partitions; the rate is that of a gather of the whole array."""
    members = [self.devices[partition] for partition in group]
    if len({member.slice for member in members}) > 1:
      return Route(lanes=(DCN,), rate=self._network, hops=1)
    rate, lanes, hops = 0.0, [], 0
    for axis, places, ways, stride in self._along(members):
      rate += ways * self._link / stride
      lanes += [f"{AXES[axis]}{direction}" for direction in DIRECTIONS]
      hops += (places[-1] - places[0]) // ways
    # Two cores of one chip: no link between them.
    return Route(lanes=tuple(lanes), rate=rate or math.inf, hops=max(hops, 1))

  def all_to_all_rate(self, group: Sequence[int]) -> float:
    """Bytes per second that a member sends in an all-to-all: half of all cross the middle of the slowest axis."""
    members = [self.devices[partition] for partition in group]
    if len({member.slice for member in members}) > 1:
      return self._network
    slowest = math.inf
    for _, places, ways, stride in self._along(members):
      n = len(places)
      # Of the n·b bytes of a line of members, each of which keeps 1/g, so many cross the middle in one direction.
      crossing = (n // 2) * (n - n // 2) / n * len(group) / (len(group) - 1)
      slowest = min(slowest, ways * self._link / stride / crossing)
    return slowest

  def _along(self, members: Sequence[Device]) -> Iterator[tuple[int, list[int], int, int]]:
    """(an axis that a group spans, where along it, by how many ways between the ends, how many links between members).

    Groups whose members are every n-th chip share the links with the groups in between.
    """
    for axis, length in enumerate(self.shape):
      places = sorted({member.at[axis] for member in members})
      if len(places) > 1:
        stride = min(b - a for a, b in itertools.pairwise(places))
        yield axis, places, 2 if self._closed[axis] and len(places) * stride == length else 1, stride

  def permute(self, pairs: Iterable[tuple[int, int]]) -> Route:
    """For a permute: each array goes one way, axis by axis, and shares its links with those that go over them too."""
    load: collections.Counter[tuple[Coordinates, int, int]] = collections.Counter()
    hops = 1
    for source, target in pairs:
      a, b = self.devices[source], self.devices[target]
      if a.slice != b.slice:
        return Route(lanes=(DCN,), rate=self._network, hops=1)
      way = list(self._way(a.slice, a.at, b.at))
      hops = max(hops, len(way))
      load.update(way)
    lanes = sorted({f"{AXES[axis]}{DIRECTIONS[direction < 0]}" for _, axis, direction in load})
    # Where the last of a line sends to the first, its way back has the other direction.
    return Route(lanes=tuple(lanes), rate=self._link / max(load.values()) if load else math.inf, hops=hops)

  def _way(self, number: int, at: Coordinates, to: Coordinates) -> Iterator[tuple[Coordinates, int, int]]:
    """The links from one chip to another: whose, along which axis, in which direction."""
    here = list(at)
    for axis, length in enumerate(self.shape):
      forward = (to[axis] - here[axis]) % length if self._closed[axis] else to[axis] - here[axis]
      step = forward if not self._closed[axis] or forward <= length // 2 else forward - length
      direction = 1 if step > 0 else -1
      for _ in range(abs(step)):
        yield (number, *here), axis, direction
        here[axis] = (here[axis] + direction) % length


def axes_of_groups(group: Sequence[int], mesh: Mapping[str, int]) -> tuple[str, ...]:
  """The axes of a mesh, given as sizes by name, along which partitions differ; they count the last axis fastest."""
  rest, found = list(group), []
  for name, size in reversed(tuple(mesh.items())):
    if len({partition % size for partition in rest}) > 1:
      found.append(name)
    rest = [partition // size for partition in rest]
  return tuple(reversed(found))

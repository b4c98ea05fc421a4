# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The torus of a slice's chips: how long its axes are, and which of them are closed to rings.

MaxText's table of topologies has the lengths (`host.topology.slice_of`). Which axes are closed follows from them by one
rule. MaxText's table says it, too (`wrap`); tests compare the rule with it.
"""

from collections.abc import Sequence
import dataclasses
import itertools
import math

# Bytes of a shard from which on the TPU compiler (libtpu 0.0.48.1; benchmarks.workarounds gather_along_ring) gathers over
# all chips that are `is_one_ring` in one step on the SparseCores.
LEAST_ALONG_RING = 1 << 20
# Chips along an axis that is closed in two dimensions; in three dimensions all are closed if each is a multiple of this.
_RING_2D, _RING_3D = 16, 4

# The chips along each axis, and devices of a chip, of slices whose devices JAX orders as a ring, or else not as a box
# (`jax._src.mesh_utils`): of v5e and v6e, v5p, and TPU7x.
_NO_BOX = {((2, 2), 1), ((4, 4), 1), ((2, 2, 2), 1), ((2, 2, 1), 2), ((2, 2, 2), 2), ((2, 2, 4), 2)}


def closed(lengths: Sequence[int]) -> tuple[bool, ...]:
  """Returns which axes of a torus are closed to rings.

  - v5e, v6e: axes of 16 chips, so of 8 × 16 chips the long one (jax-ml.github.io/scaling-book/tpus).
  - v4, v5p, TPU7x: all axes if each is a multiple of 4, as 4 × 4 × 4 chips and larger slices are; else none
    (docs.cloud.google.com/tpu/docs/v4, v5p).
  """
  if len(lengths) == 2:
    return tuple(length == _RING_2D for length in lengths)
  return (all(length % _RING_3D == 0 for length in lengths),) * len(lengths)


def is_one_ring(lengths: Sequence[int]) -> bool:
  """Returns whether the TPU compiler adds up over all chips of a slice along one ring, by one reduce-scatter.

  It does so (libtpu 0.0.48.1; benchmarks.workarounds reduce_scatter_along_ring) over 2 × 4 and 4 × 8 chips. No axis of
  these is closed, so along one ring it takes half the time that it takes along one axis after the other. Of 4 × 4, 8 × 8
  and 16 × 16 chips, and in three dimensions, the compiler makes an all-reduce, which sends twice as much. Of 8 × 16 chips
  the long axis is closed.
  """
  lengths = [length for length in lengths if length > 1]
  return len(lengths) == 2 and lengths[0] != lengths[1] and not any(closed(lengths))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slice:
  """The chips of a slice."""

  name: str  # its topology, such as v5p-256
  lengths: tuple[int, ...]  # chips along each axis
  cores: int = 1  # devices of JAX in a chip. There is no link between them.

  @property
  def devices(self) -> int:
    return math.prod(self.lengths) * self.cores

  @property
  def links(self) -> tuple[int, ...]:
    """Over how many links a device gathers along each axis: both ways round a ring, and one from the end of a line."""
    return tuple(2 if is_closed else 1 for is_closed in closed(self.lengths))

  @property
  def hops(self) -> int:
    """Over how many links the last chip reaches the first."""
    of_axes = zip(self.lengths, closed(self.lengths), strict=True)
    return sum(1 if is_closed else length - 1 for length, is_closed in of_axes)

  def spanned(self, group: int) -> list[tuple[int, ...]]:
    """Returns the axes, counted from 0, that together have as many devices as a group, fewest first.

    JAX gives a mesh axis the devices of a chip first (`jax._src.mesh_utils`).
    """
    numbers = range(len(self.lengths))
    some = [each for count in range(len(numbers) + 1) for each in itertools.combinations(numbers, count)]
    sizes = dict.fromkeys((self.cores, 1))  # with all devices of a chip, and with one
    return [each for size in sizes for each in some if size * math.prod(self.lengths[axis] for axis in each) == group]

  def links_of(self, group: int) -> float:
    """Returns over how many links a device of a group gathers; where no axes are as long, a share by logarithms.

    It is infinite for the devices of one chip.
    """
    if spanned := self.spanned(group):
      return sum(self.links[axis] for axis in spanned[0]) or math.inf
    return sum(self.links) * math.log(group) / math.log(self.devices)

  def links_in_steps(self, group: int, rings_last: float = 1.0) -> float:
    """Returns over how many links a device of a group gathers on average if it gathers along one axis after another.

    The last step brings most. A share, `rings_last`, goes over lines before rings, the rest over the minor axis first.
    Along one ring through all chips there is one step, and where JAX orders all devices as no box.
    """
    at_once = self.links_of(group)
    if group == self.devices and (is_one_ring(self.lengths) or (self.lengths, self.cores) in _NO_BOX):
      return at_once
    if not (spanned := self.spanned(group)):
      return min(at_once, max(self.links))
    axes = spanned[0]
    lines_first, minor_first = self._takes(sorted(axes, key=self.links.__getitem__)), self._takes(axes[::-1])
    takes = rings_last * lines_first + (1 - rings_last) * minor_first
    return 1 / takes if takes else math.inf

  @property
  def slower_in_two_steps(self) -> float:
    """How many times as long as at once all devices scatter in two steps.

    Of two axes the major one comes first. Otherwise each step is taken to use half of the links.
    """
    axes = [axis for axis, length in enumerate(self.lengths) if length > 1]
    return self.links_of(self.devices) * self._takes(axes[::-1]) if len(axes) == 2 else 2.0

  def _takes(self, axes: Sequence[int]) -> float:
    """Seconds in which a device receives what the others have, one axis after another; over one link it takes one."""
    received, takes, together = 0.0, 0.0, 1
    for axis in axes:
      comes = together * (self.lengths[axis] - 1)
      received, takes, together = received + comes, takes + comes / self.links[axis], together * self.lengths[axis]
    return takes / received if received else 0.0

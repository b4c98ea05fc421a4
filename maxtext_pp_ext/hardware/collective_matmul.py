# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Collective matmul: products that run shard by shard while their weight travels round a ring of devices.

XLA's partitioner makes such loops of gathers of weights that products use, and of reductions of their gradients
("Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning Models", ASPLOS 2023). The TPU
compiler does so where more than 4 and less than 64 devices share a weight, whatever the sizes of the product, from a size
of the weight on that a flag gives (MaxText's set DISABLE_COLLECTIVE_MATMUL). A step of the loop takes two shards. Where
they are part of what is contracted, each step adds to all results.
"""

from collections.abc import Iterator
import dataclasses

from maxtext_pp_ext.hardware.chips import Chip, HOP_SECONDS, LINK_EFFICIENCY

_MORE_THAN, _LESS_THAN = 4, 64  # devices
_AT_ONCE = 2  # shards, one from each side
# What the sums of gradients take as they pass each device, in HBM round trips of the gradient: with 4096 tokens and a
# gradient of 4096 × 14336 over 32 devices 2.5 ms on v5e, 0.6 on v6e.
_SUM_ROUND_TRIPS = 4
# Over how many devices of a chip's slices nothing computes beside the permutations: `benchmarks.held_back`, none of
# llama2-7b and qwen2.5-7b. Over 8 and 16 devices, and on other chips, the loop's products do.
_ALONE = {"v5e": 32}


def is_made(devices: int, size: float, threshold: float) -> bool:
  """Returns whether XLA makes a loop for a weight of so many bytes that devices share, with the flag's value in MiB."""
  return _MORE_THAN < devices < _LESS_THAN and size >= threshold * (1 << 20)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CollectiveMatmul:
  """The products of a weight, of all layers of a model on one device."""

  count: float  # elements of all layers
  along: int  # length of the dimension along which they are sharded
  others: float  # elements of the other dimensions of one layer's
  contracted: bool  # whether forward contracts the dimension along which they are sharded
  devices: int  # that share them
  hops: int  # links from the last of them back to the first
  tokens: float  # of a device
  itemsize: int

  @property
  def sent(self) -> float:
    """Bytes that a device sends to gather them once, or to reduce their gradients."""
    return self.count * self.itemsize * (1 - 1 / self.devices)

  def seconds(self, chip: Chip, again: float, vmem: float) -> tuple[float, float]:
    """(seconds by which products take longer than at the peak, seconds in which they wait for shards), of a step.

    Args:
      chip: of the devices.
      again: the share of forward that backward computes again.
      vmem: bytes of VMEM that are left to arrays.
    """
    products, layers = 2 * self.tokens * self.count / chip.flops, self.count / (self.along * self.others)
    travels = self.sent / (chip.link * LINK_EFFICIENCY) + layers * (self.devices - 1) * self.hops * HOP_SECONDS
    longer = waits = 0.0
    for takes, times in self._passes(chip, products, again, vmem):
      longer += times * (takes - products)
      waits += times * (travels if _ALONE.get(chip.name) == self.devices else max(travels - takes, 0.0))
    return longer, waits

  def _passes(self, chip: Chip, products: float, again: float, vmem: float) -> Iterator[tuple[float, float]]:
    """Yields (seconds of a product's loop, how many times it runs)."""
    steps = self.devices / _AT_ONCE
    wide = self.tokens * self.count / self.along  # elements of the activations on the side that is not sharded
    in_vmem = self.itemsize * self.tokens * (self.others + self.along) <= vmem
    read = 0.0 if in_vmem else steps * wide * self.itemsize / chip.hbm_bandwidth
    adds_to_all = max(products, steps * wide / (chip.results_per_cycle * chip.clock)) + read
    reads_all = products + read
    forward, backward = (adds_to_all, reads_all) if self.contracted else (reads_all, adds_to_all)
    yield forward, 1 + again
    yield backward, 1
    yield reads_all + 2 * _SUM_ROUND_TRIPS * self.count * self.itemsize / chip.hbm_bandwidth, 1

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Collective matmul: products that run shard by shard while their weight travels round a ring of devices.

XLA's partitioner makes such loops of gathers of weights that products use, and of reductions of their gradients
("Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning Models", ASPLOS 2023). The TPU
compiler does so for the layers' weights if all devices share them, more than 4 and less than 64, from a size of the
weight on that a flag gives (MaxText's set DISABLE_COLLECTIVE_MATMUL). What backward computes again it gathers first. A
step of the loop takes two shards. Where they are part of what is contracted, each step adds to all results.
"""

from collections.abc import Iterator
import dataclasses

from maxtext_pp_ext.hardware.chips import Chip, HOP_SECONDS, LINK_EFFICIENCY

_MORE_THAN, _LESS_THAN = 4, 64  # devices
_AT_ONCE = 2  # shards, one from each side
# What the sums of gradients take as they pass each device, in HBM round trips of the gradient: where VMEM holds the
# activations, 2048 × 4096 × 14336 over 32 devices of v6e takes 0.6 ms longer than the product, and a round trip 0.14.
_SUM_ROUND_TRIPS = 4
# Nothing is fused into the loops' products. Activation functions and their derivatives, and copies for the gradients of
# weights, read or write the activations of the side that is not sharded this many times for each weight. In Mistral 7B on
# v6e-8 they take 56 ms, as long as 10 times those of the MLP, which has three weights (`benchmarks.held_back --hlo …`).
_PASSES = 10 / 3
# The loop's products hide its permutations. Two things prevent it:
# - On v5e permutations round more devices than 16 are not asynchronous: those of qwen2.5-7b and llama2-7b over 32 (4 × 8)
#   are not, those of qwen3-1.7b over 8 and of qwen3-4b and gemma2-2b over 16 are.
# - Where memory is short the scheduler orders a program by what it holds. Of qwen3-4b, which has 16.2 of 16.9 GB with
#   `minimal_with_context`, 83 of 100 permutations have nothing beside them, with `full` none; of qwen3-1.7b with 13.5 GB
#   none (`benchmarks.held_back --hlo …`).
_MOST_ASYNCHRONOUS = {"v5e": 16}
_SHORT_OF_MEMORY = 0.95  # of a device's memory


def is_made(devices: int, sharing: int, size: float, threshold: float) -> bool:
  """Returns whether XLA makes a loop for a weight of so many bytes that some of the devices share.

  `threshold` is the flag's value in MiB.
  """
  return _MORE_THAN < devices < _LESS_THAN and sharing == devices and size >= threshold * (1 << 20)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CollectiveMatmul:
  """The products of a weight in forward and backward, of all layers of a model on one device."""

  count: float  # elements of all layers
  along: float  # length of the dimension along which they are sharded, on a device once they are gathered
  others: float  # elements of the other dimensions of one layer's
  devices: int  # all that there are
  hops: int  # links from the last device back to the first
  tokens: float  # of a device
  itemsize: int

  @property
  def sent(self) -> float:
    """Bytes that a device sends to gather them once, or to reduce their gradients."""
    return self.count * self.itemsize * (1 - 1 / self.devices)

  def seconds(self, chip: Chip, vmem: float, over_peak: float, memory: float = 0.0) -> tuple[float, float, float]:
    """(by how much products take longer than without loops, transfers that they wait for, those beside them), in seconds.

    Args:
      chip: of the devices.
      vmem: bytes of VMEM that are left to arrays.
      over_peak: how many times as long as at the peak products take without loops.
      memory: bytes that the step needs at most.
    """
    products = over_peak * 2 * self.tokens * self.count / chip.flops
    layers = self.count / (self.along * self.others)
    alone = self.devices > _MOST_ASYNCHRONOUS.get(chip.name, self.devices) or memory > _SHORT_OF_MEMORY * chip.hbm_bytes
    # In both directions at a time, unless nothing runs beside. The way back has the links of the other direction.
    rounds = layers * (self.devices - 1) / (1 if alone else _AT_ONCE)
    travels = self.sent / (chip.link * LINK_EFFICIENCY) + rounds * self.hops * HOP_SECONDS
    loops = list(self._loops(chip, products, vmem))
    waits = sum(travels if alone else max(travels - each, 0.0) for each in loops)
    apart = chip.moves(_PASSES * self._activations)
    return sum(loops) - len(loops) * products + apart, waits, len(loops) * travels - waits

  @property
  def _activations(self) -> float:
    """Elements of those on the side that is not sharded, of all layers."""
    return self.tokens * self.count / self.along

  def _loops(self, chip: Chip, products: float, vmem: float) -> Iterator[float]:
    """Yields the seconds of the loops of forward, of its input's gradient, and of the weight's."""
    steps = self.devices / _AT_ONCE
    in_vmem = self.itemsize * self.tokens * (self.others + self.along) <= vmem
    read = 0.0 if in_vmem else steps * self._activations * self.itemsize / chip.hbm_bandwidth
    yield max(products, steps * self._activations / (chip.results_per_cycle * chip.clock)) + read  # adds to all
    yield products + read
    yield products + max(read, 2 * _SUM_ROUND_TRIPS * self.count * self.itemsize / chip.hbm_bandwidth)

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Rates of each kind of device, to bound step times from below, to estimate and to project them.

Sources:

- Peak bfloat16 FLOPs and HBM's size and rate: Google Cloud's pages (docs.cloud.google.com/tpu/docs/v4, v5e, v5p, v6e,
  tpu7x). A chip of TPU7x is two devices.
- Clock: peak FLOPs divided by two per multiply-accumulate unit, of which the matrix units of a device have 4 × 128 × 128
  (v5e), 8 × 128 × 128 (v4, v5p) and 4 × 256 × 256 (v6e). TPU7x is taken to have those of v6e; nobody has verified it.
- Links, one direction of one link, and PCIe: "How to Scale Your Model" (jax-ml.github.io/scaling-book/tpus); TPU7x from
  its page, the chip's 1200 GB/s in both directions over 6 links.
- The data-centre network, nominal: a host's, divided by its chips: v5e 2 × 100 Gbit/s for 8, v5p 50 Gbit/s per chip, v6e
  and 7x 100, v4 the 6.25 GB/s of the same book. Measured: 4.11 GB/s per chip in an all-reduce over two slices v6e-256
  (github.com/AI-Hypercomputer/tpu-recipes, microbenchmarks; the formula behind that figure is not published).
"""

from __future__ import annotations

import dataclasses

_GIB = 1 << 30
# Shares of the peak that kernels reach. That of grouped products is fitted to two published runs, deepseek2-16b-v5p-8 and
# mixtral-8x7b-v5p-256. The others are assumptions.
KERNEL_EFFICIENCY = {"attention": 0.5, "grouped product": 0.4, "other": 1.0}
LINK_EFFICIENCY = 0.9  # share of their rate that links reach, an assumption


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
  """One device of JAX.

  Attributes:
    name: as in the names of topologies, such as v5p.
    flops: bfloat16 FLOPs per second.
    clock: cycles per second.
    hbm_bytes: memory in bytes.
    hbm_bandwidth: bytes per second between the device and that memory.
    link: bytes per second of one link to a neighbour, in one direction.
    links: how many links it has; two for each axis of the torus.
    network: bytes per second it can send to other slices, nominal.
    network_measured: the same as somebody measured it; None if nobody is known to have.
    host_bandwidth: bytes per second to its host's memory, in one direction.
  """

  name: str
  flops: float
  clock: float
  hbm_bytes: int
  hbm_bandwidth: float
  link: float
  links: int
  network: float
  network_measured: float | None = None
  host_bandwidth: float = 16e9

  @property
  def interconnect(self) -> float:
    """Bytes per second it can send to others of its slice, over all links."""
    return self.links * self.link


_CHIPS = (
    Chip(
        name="v4",
        flops=275e12,
        clock=1.049e9,
        hbm_bytes=32 * _GIB,
        hbm_bandwidth=1228e9,
        link=45e9,
        links=6,
        network=6.25e9,
    ),
    Chip(
        name="v5e",
        flops=197e12,
        clock=1.503e9,
        hbm_bytes=16 * _GIB,
        hbm_bandwidth=819e9,
        link=45e9,
        links=4,
        network=3.125e9,
    ),
    Chip(
        name="v5p",
        flops=459e12,
        clock=1.751e9,
        hbm_bytes=95 * _GIB,
        hbm_bandwidth=2765e9,
        link=90e9,
        links=6,
        network=6.25e9,
    ),
    Chip(
        name="v6e",
        flops=918e12,
        clock=1.751e9,
        hbm_bytes=32 * _GIB,
        hbm_bandwidth=1638e9,
        link=90e9,
        links=4,
        network=12.5e9,
        network_measured=4.11e9,
        host_bandwidth=32e9,
    ),
    Chip(
        name="tpu7x",
        flops=2307e12 / 2,
        clock=2.2e9,
        hbm_bytes=96 * _GIB,
        hbm_bandwidth=7380e9 / 2,
        link=50e9,
        links=6,
        network=6.25e9,
        host_bandwidth=32e9,
    ),
)
CHIPS = {chip.name: chip for chip in _CHIPS}


def of_topology(topology: str) -> Chip | None:
  """Returns the chip of a `compile_topology` such as v5p-256; None if it is not known."""
  return CHIPS.get(topology.partition("-")[0])


# What JAX calls them; both names of a chip are in use (jax/_src/tpu_info.py).
_DEVICE_KINDS = {
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "TPU7x": "tpu7x",
}


def of_device_kind(kind: str) -> Chip | None:
  """Returns the chip of a JAX device by its `device_kind`, such as "TPU v5 lite"; None if it is not known."""
  return CHIPS.get(_DEVICE_KINDS.get(kind, ""))


def bounds(
    chip: Chip, *, flops: float, outside_flops: float, bubble_fraction: float, sent: float, between_slices: float
) -> dict[str, float]:
  """Returns the seconds that "compute", "interconnect" and "network" take in a step, each at its peak rate.

  If transfers and compute overlap fully, a step takes the largest of the three; if nothing overlaps, their sum.

  Args:
    chip: the device.
    flops: FLOPs of one device and step in the pipeline, rematerialisation included.
    outside_flops: FLOPs outside the pipeline.
    bubble_fraction: share of a pipeline's iterations in which a stage idles.
    sent: bytes sent in all, within the slice and to other slices.
    between_slices: of these, bytes sent to other slices.
  """
  return {
      "compute": (flops / (1 - bubble_fraction) + outside_flops) / chip.flops,
      "interconnect": max(sent - between_slices, 0) / chip.interconnect,
      "network": between_slices / chip.network,
  }

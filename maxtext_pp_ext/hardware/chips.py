# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The rates of each kind of device.

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
LINK_EFFICIENCY = 0.9  # share of their rate that links reach, an assumption
HOP_SECONDS = 1e-6  # a message's way over one link, by the same book


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
  """One device of JAX."""

  name: str  # as in the names of topologies, such as v5p
  # What JAX calls it (jax/_src/tpu_info.py); first the name that JAX lays meshes out by (mesh_utils.py).
  device_kinds: tuple[str, ...] = ()
  flops: float  # bfloat16 FLOPs per second
  clock: float  # cycles per second
  hbm_bytes: int  # memory in bytes
  hbm_bandwidth: float  # bytes per second between the device and that memory
  link: float  # bytes per second of one link to a neighbour, in one direction
  links: int  # how many links it has; two for each axis of the torus
  network: float  # bytes per second it can send to other slices, nominal
  network_measured: float | None = None  # the same as somebody measured it; None if nobody is known to have
  host_bandwidth: float = 16e9  # bytes per second to its host's memory, in one direction

  @property
  def interconnect(self) -> float:
    """Bytes per second it can send to others of its slice, over all links."""
    return self.links * self.link


CHIPS = {
    chip.name: chip
    for chip in (
        Chip(
            name="v4",
            device_kinds=("TPU v4",),
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
            device_kinds=("TPU v5 lite", "TPU v5e"),
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
            device_kinds=("TPU v5", "TPU v5p"),
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
            device_kinds=("TPU v6 lite", "TPU v6e"),
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
            device_kinds=("TPU7x",),
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
}


def of_topology(topology: str) -> Chip | None:
  """Returns the chip of a `compile_topology` such as v5p-256; None if it is not known."""
  return CHIPS.get(topology.partition("-")[0])


def of_device_kind(kind: str) -> Chip | None:
  """Returns the chip of a JAX device by its `device_kind`, such as "TPU v5 lite"; None if it is not known."""
  return next((chip for chip in CHIPS.values() if kind in chip.device_kinds), None)

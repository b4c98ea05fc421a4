# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Peak rates of each kind of device, to bound step times from below.

Sources: peak bf16 FLOPs, HBM and interconnect are from Google Cloud's pages (docs.cloud.google.com/tpu/docs/v4, v5e, v5p,
v6e, tpu7x). Interconnect is one direction of all links together, half of what those pages call bidirectional. The
data-centre network is that of a host, divided by its chips: v5e 2 × 100 Gbit/s for 8 chips, v5p 50 Gbit/s per chip, v6e
and 7x 100. For v4 it is the 6.25 GB/s of the book "How to Scale Your Model" (jax-ml.github.io/scaling-book/tpus). A chip
of TPU7x is two devices.
"""

from __future__ import annotations

import dataclasses

_GIB = 1 << 30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
  """One device of JAX.

  Attributes:
    flops: bfloat16 FLOPs per second.
    hbm_bytes: memory in bytes.
    interconnect: bytes per second it can send to others of its slice.
    network: bytes per second it can send to other slices.
  """

  flops: float
  hbm_bytes: int
  interconnect: float
  network: float


CHIPS = {
    "v4": Chip(flops=275e12, hbm_bytes=32 * _GIB, interconnect=300e9, network=6.25e9),
    "v5e": Chip(flops=197e12, hbm_bytes=16 * _GIB, interconnect=200e9, network=3.125e9),
    "v5p": Chip(flops=459e12, hbm_bytes=95 * _GIB, interconnect=600e9, network=6.25e9),
    "v6e": Chip(flops=918e12, hbm_bytes=32 * _GIB, interconnect=400e9, network=12.5e9),
    "tpu7x": Chip(flops=2307e12 / 2, hbm_bytes=96 * _GIB, interconnect=300e9, network=6.25e9),
}


def of_topology(topology: str) -> Chip | None:
  """Returns the chip of a `compile_topology` such as v5p-256; None if it is not known."""
  return CHIPS.get(topology.partition("-")[0])


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

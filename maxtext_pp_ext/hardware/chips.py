# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The rates of each kind of device.

Sources:

- HBM's size: of v5e and v6e what the compiler lets a program take, as its errors say ("exceeds available HBM"). Of others
  by the pages named next.
- Peak bfloat16 FLOPs and HBM's rate: Google Cloud's pages (docs.cloud.google.com/tpu/docs/v4, v5e, v5p, v6e,
  tpu7x). A chip of TPU7x is two devices.
- Cores of a device, and the VMEM of a core: jax/_src/tpu_info.py.
- Matrix units: of a device 4 × 128 × 128 (v5e), 8 × 128 × 128 (v4, v5p) and 4 × 256 × 256 (v6e). TPU7x is taken to have
  those of v6e; nobody has verified it.
- Clock: peak FLOPs divided by two per multiply-accumulate unit of the matrix units.
- Results of products per cycle: the TPU compiler's cycles for 4096 × 128 × 14336, which contracts too little to fill the
  matrix units: 536 µs on v5e, 179 on v5p, 238 on v6e. v4 has the units of v5p, and TPU7x is taken to have those of v6e.
- Products of layers, with what the TPU compiler fuses into them, by its cycles, over the time at the peak. Without XLA
  flags it is 1.08 to 1.15 on v5e (Qwen2.5 7B, Qwen3 4B), 1.19 to 1.29 on v5p (Llama 3 70B, Gemma 2 9B), 1.38 to 1.67 on
  v6e (Llama 3 8B, Mistral 7B, Gemma 3 12B), with 2048 to 8192 rows. With 48 MiB of scoped VMEM it is 1.02 to 1.04 on v5e
  and v5p (Llama 2 7B, Llama 3 70B), where their bytes take 0.07 to 0.16 times as long as products at the peak. On v6e it
  is 1.2 to 1.37 (Llama 3 8B), the more the fewer rows there are, and their bytes take 0.3 to 0.5 times as long (`python
  -m benchmarks.compiler_figures`, `benchmarks.policies`, `benchmarks.held_back`). v4 is taken to be like v5p, TPU7x like
  v6e.
- Operations value by value: the TPU compiler's cycles for x + 1 of 4096 × 14336 values, 713 µs on v5e, 239 on v5p and 355
  on v6e whether they have 32 bits or 16. v4 is taken to reach as large a share of HBM's rate as v5p, TPU7x as v6e.
- Links, one direction of one link, and PCIe: "How to Scale Your Model" (jax-ml.github.io/scaling-book/tpus); TPU7x from
  its page, the chip's 1200 GB/s in both directions over 6 links.
- The host's memory: that of a TPU VM, divided by its devices (the same pages of Google Cloud: RAM per VM): v5e 384 GB for
  8, v5p 448 for 4, v6e 720 for 4, TPU7x 960 for 8 devices, v4 400 for 4.
- The data-centre network, nominal: a host's, divided by its chips: v5e 2 × 100 Gbit/s for 8, v5p 50 Gbit/s per chip, v6e
  and 7x 100, v4 the 6.25 GB/s of the same book. Measured: 4.11 GB/s per chip in an all-reduce over two slices v6e-256
  (github.com/AI-Hypercomputer/tpu-recipes, microbenchmarks; the formula behind that figure is not published).
"""

import dataclasses

_GB, _GIB, _MIB = 10**9, 1 << 30, 1 << 20
LINK_EFFICIENCY = 0.9  # share of their rate that links reach, an assumption
HOP_SECONDS = 1e-6  # a message's way over one link, by the same book


@dataclasses.dataclass(frozen=True)
class Chip:
  """One device of JAX."""

  name: str  # as in the names of topologies, such as v5p
  # What JAX calls it (jax/_src/tpu_info.py); first the name that JAX lays meshes out by (mesh_utils.py).
  device_kinds: tuple[str, ...]
  flops: float  # bfloat16 FLOPs per second
  clock: float  # cycles per second
  cores: int  # that compute as one
  matrix_unit: int  # rows, and columns, of one
  results_per_cycle: float  # of products, at most
  # How many times as long as at the peak products of layers take, with what is fused into them: with the compiler's own
  # limit of scoped VMEM, and with 48 MiB or more. Added then is this share of the time in which their bytes move.
  over_peak: float
  over_peak_with_vmem: float
  bytes_not_hidden: float
  hbm_bytes: int  # memory in bytes
  hbm_bandwidth: float  # bytes per second between the device and that memory
  elementwise: float  # bytes per second that operations value by value read and write, as if all values had 32 bits
  vmem_bytes: int  # memory on the chip, in bytes
  link: float  # bytes per second of one link to a neighbour, in one direction
  links: int  # how many links it has; two for each axis of the torus
  host_bandwidth: float  # bytes per second to its host's memory, in one direction
  host_bytes: int  # its share of that memory, in bytes
  network: float  # bytes per second it can send to other slices, nominal
  network_measured: float | None = None  # the same as somebody measured it; None if nobody is known to have
  # Whether the compiler lets compute run beside all-gathers without flags. "Continuation fusion for AllGather is for v5e
  # (Viperlite) only", as libtpu says where a flag asks for it on v6e.
  gathers_beside_compute: bool = False

  @property
  def interconnect(self) -> float:
    """Bytes per second it can send to others of its slice, over all links."""
    return self.links * self.link

  def moves(self, values: float) -> float:
    """Seconds in which it reads, or writes, so many values one by one, whatever their dtype."""
    return 4 * values / self.elementwise

  def with_network(self, rate: float) -> "Chip":
    """The same, but it can send so many bytes per second to other slices."""
    return dataclasses.replace(self, network=rate, network_measured=None)


_CHIPS = (
    Chip(
        name="v4",
        device_kinds=("TPU v4",),
        flops=275e12,
        clock=1.049e9,
        cores=2,
        matrix_unit=128,
        results_per_cycle=187,
        over_peak=1.23,
        over_peak_with_vmem=1.0,
        bytes_not_hidden=0.25,
        hbm_bytes=32 * _GIB,
        hbm_bandwidth=1228e9,
        elementwise=874e9,
        vmem_bytes=16 * _MIB,
        link=45e9,
        links=6,
        host_bandwidth=16e9,
        host_bytes=100 * _GB,
        network=6.25e9,
    ),
    Chip(
        name="v5e",
        device_kinds=("TPU v5 lite", "TPU v5e"),
        flops=197e12,
        clock=1.503e9,
        cores=1,
        matrix_unit=128,
        results_per_cycle=73,
        over_peak=1.11,
        over_peak_with_vmem=1.0,
        bytes_not_hidden=0.25,
        hbm_bytes=round(15.75 * _GIB),
        hbm_bandwidth=819e9,
        elementwise=659e9,
        vmem_bytes=128 * _MIB,
        link=45e9,
        links=4,
        host_bandwidth=16e9,
        host_bytes=48 * _GB,
        network=3.125e9,
        gathers_beside_compute=True,
    ),
    Chip(
        name="v5p",
        device_kinds=("TPU v5", "TPU v5p"),
        flops=459e12,
        clock=1.751e9,
        cores=2,
        matrix_unit=128,
        results_per_cycle=187,
        over_peak=1.23,
        over_peak_with_vmem=1.0,
        bytes_not_hidden=0.25,
        hbm_bytes=95 * _GIB,
        hbm_bandwidth=2765e9,
        elementwise=1967e9,
        vmem_bytes=64 * _MIB,
        link=90e9,
        links=6,
        host_bandwidth=16e9,
        host_bytes=112 * _GB,
        network=6.25e9,
    ),
    Chip(
        name="v6e",
        device_kinds=("TPU v6 lite", "TPU v6e"),
        flops=918e12,
        clock=1.751e9,
        cores=1,
        matrix_unit=256,
        results_per_cycle=141,
        over_peak=1.5,
        over_peak_with_vmem=1.13,
        bytes_not_hidden=0.4,
        hbm_bytes=round(31.24 * _GIB),
        hbm_bandwidth=1638e9,
        elementwise=1324e9,
        vmem_bytes=128 * _MIB,
        link=90e9,
        links=4,
        host_bandwidth=32e9,
        host_bytes=180 * _GB,
        network=12.5e9,
        network_measured=4.11e9,
    ),
    Chip(
        name="tpu7x",
        device_kinds=("TPU7x",),
        flops=2307e12 / 2,
        clock=2.2e9,
        cores=1,
        matrix_unit=256,
        results_per_cycle=141,
        over_peak=1.5,
        over_peak_with_vmem=1.13,
        bytes_not_hidden=0.4,
        hbm_bytes=96 * _GIB,
        hbm_bandwidth=7380e9 / 2,
        elementwise=2983e9,
        vmem_bytes=64 * _MIB,
        link=50e9,
        links=6,
        host_bandwidth=32e9,
        host_bytes=120 * _GB,
        network=6.25e9,
    ),
)
CHIPS = {chip.name: chip for chip in _CHIPS}


def of_topology(topology: str) -> Chip | None:
  """Returns the chip of a `compile_topology` such as v5p-256; None if it is not known."""
  return CHIPS.get(topology.partition("-")[0])


def of_device_kind(kind: str) -> Chip | None:
  """Returns the chip of a JAX device by its `device_kind`, such as "TPU v5 lite"; None if it is not known."""
  return next((chip for chip in CHIPS.values() if kind in chip.device_kinds), None)

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Collective matmul: where the TPU compiler makes one, and what its products and transfers take."""

import dataclasses
import importlib.util
import os
import subprocess
import sys

import pytest

from maxtext_pp_ext.compiled import child
from maxtext_pp_ext.hardware import chips
from maxtext_pp_ext.hardware.collective_matmul import CollectiveMatmul, is_made

# JAX's name of a slice -> its chips.
SLICES = {"v5e:2x2": 4, "v5e:2x4": 8, "v5p:2x2x1": 4, "v5p:2x4x4": 32, "v5p:4x4x4": 64, "v6e:4x8": 32, "v6e:8x8": 64}
MIB_OF_WEIGHT = 16  # 2048 × 4096 in bfloat16
COMPILE = """
import sys
import jax, jax.numpy as jnp
from jax.experimental import topologies
import numpy as np

for name, *flag in (each.split() for each in sys.argv[1:]):
  devices = topologies.get_topology_desc(platform="tpu", topology_name=name).devices
  mesh = jax.sharding.Mesh(np.array(devices), ("fsdp",))
  rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))
  given = [jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=rows) for s in ((2048 * len(devices), 2048), (2048, 4096))]
  options = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": each for each in flag}
  program = jax.jit(jnp.matmul, out_shardings=rows).lower(*given).compile(compiler_options=options).as_text()
  print(name, *flag, "windowed_dot_general" in program)
"""
# A chip whose rates are round: 1 TFLOP/s, 1 G results/s, 100 GB/s of memory, links of 10 GB/s.
CHIP = dataclasses.replace(
    chips.CHIPS["v6e"],
    flops=1e12,
    clock=1e9,
    results_per_cycle=1.0,
    hbm_bandwidth=1e11,
    link=1e10 / chips.LINK_EFFICIENCY,
)
# Ten layers: 1000 × 1000 each, over 10 devices, for 100 tokens.
EACH = CollectiveMatmul(
    count=1e7, along=1000, others=1000.0, contracted=True, devices=10, hops=0, tokens=100.0, itemsize=2
)
PRODUCT = 2 * 100 * 1e7 / 1e12
RESULTS = 5 * 100 * 1e4 / 1e9  # five steps, each for all results of all layers
READ = 2 * RESULTS * 1e9 / 1e11
SUMS = 8 * 2e7 / 1e11
TRAVELS = 2e7 * 0.9 / 1e10


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the extra tools")
def test_the_compiler_makes_one_where_the_rule_says_so():
  cases = [*SLICES, f"v5e:2x4 {MIB_OF_WEIGHT}", f"v5e:2x4 {MIB_OF_WEIGHT + 1}"]
  environment = {**os.environ, **child.ENVIRONMENT, **child.WITHOUT_ACCELERATORS, "JAX_PLATFORMS": "cpu"}
  command = [sys.executable, "-c", COMPILE, *cases]
  done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
  assert done.returncode == 0, done.stderr
  given = lambda name, flag="0": is_made(SLICES[name], MIB_OF_WEIGHT << 20, float(flag))
  assert done.stdout.splitlines() == [f"{case} {given(*case.split())}" for case in cases]


@pytest.mark.parametrize(
    "contracted, again, vmem, longer",
    [
        # Forward adds to all results, and backward's two products read all of an activation in each step.
        (True, 0.0, 0, RESULTS + READ - PRODUCT + 2 * READ + SUMS),
        (True, 0.5, 0, 1.5 * (RESULTS + READ - PRODUCT) + 2 * READ + SUMS),
        # Where a weight is sharded along its outputs, the gradient of its input is what is added to.
        (False, 1.0, 0, RESULTS + READ - PRODUCT + 3 * READ + SUMS),
        (True, 0.0, 400_000, RESULTS - PRODUCT + SUMS),  # input and output of one layer fit
        (True, 0.0, 399_999, RESULTS + READ - PRODUCT + 2 * READ + SUMS),
    ],
)
def test_products_take_longer(contracted, again, vmem, longer):
  each = dataclasses.replace(EACH, contracted=contracted)
  assert each.seconds(CHIP, again, vmem)[0] == pytest.approx(longer)


def test_products_wait_for_shards_that_travel_longer_than_they_compute():
  each = dataclasses.replace(EACH, hops=3)
  travels = TRAVELS + 10 * 9 * 3 * chips.HOP_SECONDS
  takes = [RESULTS, PRODUCT, PRODUCT + SUMS]
  assert each.seconds(CHIP, 0.0, 400_000)[1] == pytest.approx(sum(max(travels - each, 0.0) for each in takes))
  slow_link = dataclasses.replace(CHIP, link=CHIP.link / 10)
  assert each.seconds(slow_link, 0.0, 400_000)[1] > 9 * TRAVELS


def test_nothing_computes_beside_permutations_over_32_chips_of_v5e():
  of = lambda chip, devices: dataclasses.replace(EACH, devices=devices).seconds(chips.CHIPS[chip], 1.0, 1e9)
  sent = lambda devices: 2e7 * (1 - 1 / devices) / (chips.CHIPS["v5e"].link * chips.LINK_EFFICIENCY)
  assert of("v5e", 32)[1] == pytest.approx(4 * sent(32)) and of("v5e", 16)[1] < 4 * sent(16)

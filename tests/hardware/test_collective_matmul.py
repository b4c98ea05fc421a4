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

# Slice, its chips, how many of them share a weight of 2048 × columns, and XLA's flag.
CASES = [
    *(
        "v5e:2x2 4 4",
        "v5e:2x4 8 8",
        "v5p:2x2x1 4 4",
        "v5p:2x4x4 32 32",
        "v5p:4x4x4 64 64",
        "v6e:4x8 32 32",
        "v6e:8x8 64 64",
    ),
    *("v6e:4x4 16 8", "v6e:8x8 64 32", "v6e:4x4 16 16 0 128", "v5e:2x4 8 8 16", "v5e:2x4 8 8 17"),
]
COMPILE = """
import sys
import jax, jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec as P
import numpy as np

for case in sys.argv[1:]:
  name, _, share, flag, columns = (*case.split(), *("0", "4096")[len(case.split()) - 3:])
  devices = np.array(topologies.get_topology_desc(platform="tpu", topology_name=name).devices)
  mesh = jax.sharding.Mesh(devices.reshape(-1, int(share)), ("data", "fsdp"))
  rows, weight = NamedSharding(mesh, P(("data", "fsdp"))), NamedSharding(mesh, P("fsdp"))
  given = [(2048 * devices.size, 2048, rows), (2048, int(columns), weight)]
  given = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=each) for *shape, each in given]
  options = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": flag} if flag != "0" else {}
  program = jax.jit(jnp.matmul, out_shardings=rows).lower(*given).compile(compiler_options=options).as_text()
  print(case, "windowed_dot_general" in program)
"""
# A chip whose rates are round: 1 TFLOP/s, 1 G results/s, 100 GB/s of memory, 200 value by value, links of 10 GB/s.
CHIP = dataclasses.replace(
    chips.CHIPS["v6e"],
    flops=1e12,
    clock=1e9,
    results_per_cycle=1.0,
    hbm_bandwidth=1e11,
    elementwise=2e11,
    link=1e10 / chips.LINK_EFFICIENCY,
)
# Ten layers: 1000 × 1000 each, over 10 devices, for 100 tokens.
EACH = CollectiveMatmul(count=1e7, along=1000, others=1000.0, devices=10, hops=0, tokens=100.0, itemsize=2)
PRODUCT = 2 * 100 * 1e7 / 1e12
RESULTS = 5 * 100 * 1e4 / 1e9  # five steps, each for all results of all layers
READ = 2 * RESULTS * 1e9 / 1e11
SUMS = 8 * 2e7 / 1e11
APART = 10 / 3 * 4 * 100 * 1e4 / 2e11  # results, each of 4 bytes, are written or read outside of the loops
TRAVELS = 2e7 * 0.9 / 1e10


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the extra tools")
def test_the_compiler_makes_one_where_the_rule_says_so():
  environment = {**os.environ, **child.ENVIRONMENT, **child.WITHOUT_ACCELERATORS, "JAX_PLATFORMS": "cpu"}
  command = [sys.executable, "-c", COMPILE, *CASES]
  done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
  assert done.returncode == 0, done.stderr
  given = lambda _, chips, share, flag="0", columns="4096": is_made(
      int(chips), int(share), 2 * 2048 * int(columns), float(flag)
  )
  assert done.stdout.splitlines() == [f"{case} {given(*case.split())}" for case in CASES]


# Forward or its input's gradient adds to all results, the other and the weight's gradient read all of an activation.
@pytest.mark.parametrize(
    "vmem, over_peak, longer",
    [
        (399_999, 1.0, RESULTS + READ - PRODUCT + READ + max(READ, SUMS) + APART),
        (400_000, 1.0, RESULTS - PRODUCT + SUMS + APART),  # input and output of one layer fit
        (400_000, 1.5, RESULTS - 1.5 * PRODUCT + SUMS + APART),
        (400_000, 2 * RESULTS / PRODUCT, SUMS + APART),  # products take longer than to add to all results
    ],
)
def test_products_take_longer(vmem, over_peak, longer):
  assert EACH.seconds(CHIP, vmem, over_peak)[0] == pytest.approx(longer)


def test_products_wait_for_shards_that_travel_longer_than_they_compute():
  each = dataclasses.replace(EACH, hops=3)
  travels = TRAVELS + 10 * 9 / 2 * 3 * chips.HOP_SECONDS
  _, waits, beside = each.seconds(CHIP, 400_000, 1.0)
  assert waits == pytest.approx(sum(max(travels - takes, 0.0) for takes in (RESULTS, PRODUCT, PRODUCT + SUMS)))
  assert waits + beside == pytest.approx(3 * travels)
  slow_link = dataclasses.replace(CHIP, link=CHIP.link / 10)
  assert each.seconds(slow_link, 400_000, 1.0)[1] > 9 * TRAVELS


@pytest.mark.parametrize(
    "chip, devices, memory, alone",
    [
        ("v5e", 16, 0.9, False),
        ("v5e", 16, 0.96, True),
        ("v5e", 32, 0.0, True),
        ("v6e", 32, 0.0, False),
        ("v6e", 32, 0.96, True),
    ],
)
def test_nothing_computes_beside_permutations_of_many_devices_of_v5e_and_where_memory_is_short(
    chip, devices, memory, alone
):
  of = chips.CHIPS[chip]
  sent = 2e7 * (1 - 1 / devices) / (of.link * chips.LINK_EFFICIENCY)
  _, waits, beside = dataclasses.replace(EACH, devices=devices).seconds(of, 1e9, 1.0, memory * of.hbm_bytes)
  assert waits + beside == pytest.approx(3 * sent)
  assert (beside == 0.0) == alone

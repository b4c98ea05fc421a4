# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The traffic that `maxtext-pp compare` reads off steps of the TPU compiler is that of the schedule."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from maxtext_pp_ext.compiled import compare
from tests.compiled import common
from tests.host.common import ROOT

EMBED, MLP, SEQUENCE, BATCH, STAGES, FSDP, LAYERS, MICROBATCHES = 512, 2048, 512, 4, 2, 2, 4, 2
KEYS = (
    *common.keys("v5p-8", embed=EMBED, mlp=MLP, layers=LAYERS, sequence=SEQUENCE, vocabulary=2048, rows_per_device=BATCH),
    f"ici_pipeline_parallelism={STAGES}",
    f"ici_fsdp_parallelism={FSDP}",
    f"num_pipeline_microbatches={MICROBATCHES}",
)
REPEATS = LAYERS // STAGES
ITERATIONS = MICROBATCHES * REPEATS + STAGES - 1
BFLOAT16 = 2
# What a device receives of a layer's weights (attention's and the MLP's) when they are gathered, and of a microbatch.
LAYER = (4 * EMBED * EMBED + 3 * EMBED * MLP) * BFLOAT16 * (FSDP - 1) // FSDP
MICROBATCH = BATCH * STAGES // MICROBATCHES * SEQUENCE * EMBED * BFLOAT16


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the extra tools")
def test_weights_and_activations_on_the_wire_of_a_tpu_step_are_those_of_the_schedule(tmp_path):
  command = [sys.executable, "-m", "maxtext_pp_ext.cli", "compare", *KEYS, "--impl", "host,circular_bsw", "--json"]
  environment = {**os.environ, "PYTHONPATH": str(ROOT)}
  done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=900, check=False)
  assert done.returncode == 0, done.stderr
  host, bsw = (json.loads(done.stdout)["implementations"][name] for name in ("host", "circular_bsw"))
  # MaxText's plain pipeline gathers a layer at each iteration, ours once per repeat; both forward and backward.
  assert compare.wire_bytes(host, loop_depth=1, payload="weights", kind="all-gather") == 2 * ITERATIONS * LAYER
  outside = compare.wire_bytes(host, loop_depth=0, payload="weights", kind="all-gather")  # embedding and logits
  assert compare.wire_bytes(bsw, payload="weights") == 2 * REPEATS * LAYER + outside
  # Two devices permute the pieces of the window.
  assert compare.wire_bytes(bsw, payload="weights", kind="collective-permute") == (2 * REPEATS - 1) * LAYER
  # A microbatch goes to the next stage at each iteration; MaxText moves its circular buffer, too.
  activations = {"payload": "activations", "kind": "collective-permute"}
  assert compare.wire_bytes(host, **activations) == 2 * 2 * ITERATIONS * MICROBATCH
  assert compare.wire_bytes(bsw, **activations) == 2 * ITERATIONS * MICROBATCH
  assert host["dot_flops"] == bsw["dot_flops"] and host["bytes"]["arguments"] == bsw["bytes"]["arguments"]
  for row in (host, bsw):
    # Together the transfers are the total that is counted on another way through the program.
    assert compare.wire_bytes(row) == pytest.approx(row["wire_total_GB"] * 1e9, abs=1e6)
    assert row["bytes"]["peak"] >= row["bytes"]["arguments"] and row["loops_without_trip_count"] == []

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Dropout in a pipeline on TPUs: backward draws the same bits as forward, whatever the layouts of both are.

MaxText's trainers use a TPU's `rng-bit-generator`, which draws other bits in another layout. With
`xla_tpu_spmd_rng_bit_generator_unsafe` each device draws separately. Layers in a pipeline draw with threefry: elementwise
arithmetic, whose bits belong to an array's elements. So a compiled step has no such instruction in the pipeline.
"""

import importlib.util
import re

import pytest

from maxtext_pp_ext.compiled import child, limits
from tests.compiled import common

KEYS = (
    *common.keys("v6e-8", embed=512, mlp=1024, layers=8, sequence=512, vocabulary=2560, rows_per_device=2),
    "ici_pipeline_parallelism=2",
    "ici_fsdp_parallelism=4",
    "compile_topology_num_slices=1",
    "num_pipeline_microbatches=2",
    "pipeline_impl=circular_bsw",
    "enable_dropout=True",
    "dropout_rate=0.1",
    "compile_xla_flags=--xla_tpu_spmd_rng_bit_generator_unsafe=true",
)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the extra tools")
def test_a_compiled_step_draws_no_bits_in_its_pipeline_that_depend_on_their_layout(tmp_path):
  file = tmp_path / "step.hlo"
  compiled = child.compile_step(KEYS, bounds=limits.Limits(), hlo_file=file)
  assert "failure" not in compiled, compiled
  program = file.read_text(encoding="utf-8")
  drawn = [line for line in program.splitlines() if re.search(r" rng-bit-generator\(", line)]
  # Outside the pipeline MaxText draws as it does without one, for the embeddings.
  assert drawn and not [line for line in drawn if "/while/" in line], drawn
  assert "threefry" in program

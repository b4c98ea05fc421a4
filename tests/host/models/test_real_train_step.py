# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Each built-in implementation, switched on by the key alone, trains as MaxText's plain pipeline does."""

import json

import pytest

from maxtext_pp_ext import registry
from tests.host.common import HOOK, TINY

STEPS = 3
# MaxText's trainer several times in one interpreter: importing it takes longer than a tiny run.
TRAIN_ALL = f"""
import sys
{HOOK}
from absl import logging
from maxtext.trainers.pre_train import train
logging.use_absl_handler()  # as absl's app.run does
logging.set_verbosity(logging.INFO)
for name in sys.argv[1].split(","):
  train.main(["", *sys.argv[2:], f"pipeline_impl={{name}}", f"metrics_file={{name}}.jsonl"])
"""


def _losses(folder, name):
  lines = (folder / f"{name}.jsonl").read_text().splitlines()
  return [json.loads(line)["learning/loss"] for line in lines]


@pytest.mark.slow  # tests/trainer trains circular_bsw with the trainer, tests/key_coverage a sample with all three
def test_every_built_in_implementation_trains_as_the_hosts_plain_pipeline_does(run_python, tmp_path):
  # 4 stages: the host's own pipeline with prefetching is wrong there, its plain one is right.
  keys = (
      *TINY,
      "base_num_decoder_layers=8",
      "ici_pipeline_parallelism=4",
      "ici_fsdp_parallelism=2",
      "steps=3",
      "learning_rate=0.01",
  )
  names = [implementation.name for implementation in registry._BUILT_IN]
  done = run_python(
      *("-c", TRAIN_ALL, ",".join(names), *keys, "num_pipeline_microbatches=8", "base_output_directory=out"),
      devices=8,
      timeout=580,
      env={"MAXTEXT_PP_EXT": ""},
  )
  for name in names[1:]:
    assert f"pipeline_impl={name} is active: 4 stages, 2 repeats, 8 microbatches" in done.stdout + done.stderr
  expected = _losses(tmp_path, "host")
  assert len(expected) == STEPS and expected[0] != expected[-1]
  for name in names[1:]:
    losses = _losses(tmp_path, name)
    # float32, eight layers, three steps: rounding differs by the order of sums alone.
    assert max(abs(a - b) / b for a, b in zip(losses, expected, strict=True)) < 1e-5, (name, losses, expected)

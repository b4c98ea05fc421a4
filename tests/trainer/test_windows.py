# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""MaxText's trainer trains in a window as with its own scan, with settings that reach into the scan or around it."""

import pytest

from maxtext_pp_ext.trainer_runs import trainer
from tests.trainer import cases
from tests.trainer.runs import Run, run_all

STEPS, DEVICES = 6, 4
# The loss moves by a thousand times as much in a step. Float32 rounding explains 2e-7.
BOUND = 1e-5
_GRAIN = ("grain_", "tokenizer_", "eval_", "num_epoch")
KEYS = {
    **{key: value for key, value in cases.SHARED.items() if not key.startswith(_GRAIN)},
    **cases.MODELS["dense"],
    "base_num_decoder_layers": 4,
    "steps": STEPS,
    "dataset_type": "synthetic",
    "ici_fsdp_parallelism": DEVICES,
}
SETTINGS = {
    "fp8": {"quantization": "fp8"},
    "offloading": {"remat_policy": "minimal_offloaded"},
    "two replicas": {
        "enable_diloco": True,
        "ici_diloco_parallelism": 2,
        "ici_fsdp_parallelism": DEVICES // 2,
        "diloco_sync_period": 2,
    },
}
MICROBATCHES = {"circular_bsw": -1, "circular": 2, "circular_ag_once": 2}


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_window_trains_as_the_scan_does(setting, tmp_path):
  keys = KEYS | SETTINGS[setting]
  runs = {"host": Run(keys=trainer.as_arguments(keys))}
  for name, microbatches in MICROBATCHES.items():
    own = {"pipeline_impl": name, "num_pipeline_microbatches": microbatches}
    runs[name] = Run(keys=trainer.as_arguments(keys | own))
  results = run_all(tmp_path, runs, devices=DEVICES)
  for metric in cases.TRAIN_METRICS:
    expected, *found = ([each[metric] for each in results.metrics(name, metric)] for name in runs)
    assert len(expected) == STEPS and expected[-1] < 0.95 * expected[0]
    for values in found:
      assert values == pytest.approx(expected, rel=BOUND)

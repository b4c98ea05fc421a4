# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Models and features whose layers cannot run in a window without a pipeline are refused by name, and no others."""

import re
import types

import pytest

from maxtext_pp_ext.host.rules import windowed_path
from tests.host.rules import test_pipelined_path


def make(**overrides):
  config = test_pipelined_path.make(ici_pipeline_parallelism=1)
  values = {"pipeline_impl": "circular_bsw", "parameter_memory_host_offload": False, **overrides}
  return types.SimpleNamespace(**(vars(config) | values))


@pytest.mark.parametrize("block", sorted(windowed_path.SCANNED_BLOCKS))
def test_blocks_that_are_scanned_over_are_accepted(block):
  assert list(windowed_path.problems(make(decoder_block=block, num_decoder_layers=12))) == []


def test_the_usual_schedule_of_gradient_accumulation_is_accepted():
  assert list(windowed_path.problems(make(gradient_accumulation_schedule="serial"))) == []


@pytest.mark.parametrize(
    "feature",
    [
        {"scan_layers": False},
        {"decoder_block": "gemma4_small"},
        {"decoder_block": "gemma3", "num_decoder_layers": 4},
        {"decoder_block": "gemma4", "num_decoder_layers": 5},
        {"decoder_block": "deepseek4", "num_decoder_layers": 4, "first_num_hash_layers": 3},
        {"decoder_block": "gpt_oss", "num_decoder_layers": 1, "inhomogeneous_layer_cycle_interval": 2},
        {"use_batch_split_schedule": True},
        {"engram_layers": [1]},
        {"use_lineage": True},
        {"use_multimodal": True, "use_mrope": True},
        {"use_multimodal": True, "decoder_block": "gemma3", "num_decoder_layers": 12},
        {"use_m3_model": True},
        {"prefetch_fsdp_weights": True},
        {"gradient_accumulation_schedule": "dual_pipe"},
        {"lora": types.SimpleNamespace(enable_lora=True)},
        {"parameter_memory_host_offload": True},
        {"distill_beta": 0.5},
    ],
    ids=str,
)
def test_what_a_window_cannot_do_is_refused_with_the_key_and_what_to_set(feature):
  [problem] = windowed_path.problems(make(**feature))
  assert any(re.search(rf"\b{key}(\.\w+)?=", problem) for key in feature) or "layers of decoder_block=" in problem
  assert "Set " in problem

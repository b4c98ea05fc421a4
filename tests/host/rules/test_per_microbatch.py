# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests that values that layers would compute per microbatch instead of per batch are refused."""

import types

import pytest

from maxtext_pp_ext.host.rules import per_microbatch


def make(**overrides):
  values = {
      "use_batch_split_schedule": False,
      "use_qk_clip": False,
      "moe_dropless_fallback": None,
      "gradient_accumulation_steps": 1,
      "enable_diloco": False,
      "num_diloco_replicas": 1,
      "micro_batch_size_to_train_on": 24,
      "num_pipeline_microbatches": 24,
      "num_experts": 8,
      "num_experts_per_tok": 2,
      "custom_mesh_and_rule": "",
      "eval_interval": -1,
      # Four devices that share the experts.
      "mesh_axes": ["stage", "expert"],
      "num_target_devices": 8,
      "ici_pipeline_parallelism": 2,
      "ici_expert_parallelism": 4,
  }
  return types.SimpleNamespace(**(values | overrides))


@pytest.mark.parametrize(
    "keys, remedy",
    [
        ({"moe_log_max_load_ratio": True}, "moe_log_max_load_ratio=False"),
        ({"log_required_ragged_buffer_factor": True}, "log_required_ragged_buffer_factor=False"),
        ({"te_moe_block": True}, "te_moe_block=False"),
        ({"moe_dropless_fallback": "layer"}, "moe_dropless_fallback=step"),
        ({"ragged_buffer_factor": 3.9}, "Set ragged_buffer_factor=-1."),
        (
            {"ragged_buffer_factor": 1.5, "use_ring_of_experts": True, "use_ragged_sort": True},
            "Set ragged_buffer_factor=-1 or moe_dropless_fallback=step.",
        ),
        ({"eval_ragged_buffer_factor": 1.5, "eval_interval": 5}, "Set eval_ragged_buffer_factor=-1 or eval_interval=-1."),
        ({"enable_diloco": True, "num_diloco_replicas": 2}, "a multiple of 48 rows"),
        (
            {"indexer_loss_scaling_factor": 0.5, "attention_type": "compressed", "use_indexer": True},
            "without a pipeline num_pipeline_microbatches=1",
        ),
        ({"use_qk_clip": True, "gradient_accumulation_steps": 2}, "gradient_accumulation_steps=1"),
    ],
)
def test_what_would_be_a_microbatchs_is_refused_by_name_with_what_to_set(keys, remedy):
  [problem] = per_microbatch.problems(make(**keys))
  key, value = next(iter(keys.items()))
  assert f"{key}={value}" in problem
  assert remedy in problem


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"ragged_buffer_factor": 4.0},
        {"eval_ragged_buffer_factor": 1.5},
        {"moe_dropless_fallback": "step", "ragged_buffer_factor": 1.5, "eval_ragged_buffer_factor": 1.5},
        {"te_moe_block": True, "use_batch_split_schedule": True},
        {"use_qk_clip": True},
        {"enable_diloco": True, "num_diloco_replicas": 2, "num_pipeline_microbatches": 12},
    ],
)
def test_what_is_the_same_of_a_microbatch_is_not_refused(keys):
  assert list(per_microbatch.problems(make(**keys))) == []

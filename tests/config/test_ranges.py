# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Which numbers a key can have: all that MaxText itself uses and that trained, and none that has no meaning."""

import itertools
import math

import pytest
import yaml

from maxtext_pp_ext.config import ranges
from maxtext_pp_ext.host.models import run_config
from tests.host.conftest import installed  # noqa: F401  pylint: disable=unused-import
from tests.key_coverage import table
from tests.parity import blocks

BAD = ("nan", "inf", "-inf", -3, 10**18)


@pytest.fixture(name="fields")
def _fields(installed):  # noqa: F811  pylint: disable=redefined-outer-name
  from maxtext.configs import types

  return types.MaxTextConfig.model_fields


def test_all_defaults_and_all_values_of_maxtexts_own_configs_are_accepted(fields):
  assert ranges.problems(fields, {key: field.default for key, field in fields.items()}) == []
  files = sorted(run_config.base_yml().parent.rglob("*.yml"))
  assert len(files) > 50
  for file in files:
    content = yaml.safe_load(file.read_text(encoding="utf-8"))
    assert not isinstance(content, dict) or ranges.problems(fields, content) == [], file


def test_all_values_that_trained_the_same_in_pipelines_and_without_are_accepted(fields):
  trained = [{entry.key: value} for entry in table.entries().values() for value in entry.equal if value != "default"]
  trained += [dict(entry.with_keys) for entry in table.entries().values()]
  trained += [dict(case.keys) for case in blocks.PIPELINED]
  assert len(trained) > 300
  for keys in trained:
    assert ranges.problems(fields, keys) == [], keys


@pytest.mark.parametrize(
    "keys, says",
    [
        ({"per_device_batch_size": -3}, "per_device_batch_size=-3 has to be more than 0."),
        ({"per_device_batch_size": math.nan}, "per_device_batch_size=nan has to be finite."),
        ({"per_device_batch_size": 1e18}, "per_device_batch_size=1e+18 can be at most 2147483647."),
        ({"max_target_length": 0}, "max_target_length=0 has to be at least 1. Set another number, such as MaxText's"),
        ({"max_target_length": "0"}, "default, max_target_length=2048."),
        ({"base_emb_dim": 0}, "base_emb_dim=0 has to be at least 1."),
        ({"num_experts": 0}, "num_experts=0 has to be at least 1."),
        ({"base_moe_mlp_dim": 0}, "base_moe_mlp_dim=0 has to be at least 1, or -1."),
        ({"ici_tensor_parallelism": 0}, "ici_tensor_parallelism=0 has to be at least 1, or -1."),
        ({"base_num_decoder_layers": 10**6}, "base_num_decoder_layers=1000000 can be at most 65536."),
        ({"learning_rate": math.inf}, "learning_rate=inf has to be finite."),
        ({"num_slices": 10**9}, "num_slices=1000000000 can be at most 65536."),
        ({"capacity_factor": 1e18}, "capacity_factor=1e+18 can be at most"),
        ({"final_logits_soft_cap": -1.0}, "final_logits_soft_cap=-1.0 has to be at least 0. Leave it out."),
        ({"steps": -2}, "steps=-2 has to be at least -1."),
    ],
    ids=lambda value: "" if isinstance(value, str) else str(value),
)
def test_a_number_without_a_meaning_is_told_with_its_key_and_another_one(fields, keys, says):
  (problem,) = ranges.problems(fields, keys)
  assert says in problem


MEANINGS = {
    "no dropout": {"dropout_rate": 0.0},
    "the devices that are left": {"ici_fsdp_parallelism": -1, "dcn_data_parallelism": -1, "ici_tensor_parallelism": -1},
    "no window": {"sliding_window_size": 0},
    "no evaluation": {"eval_interval": -1, "eval_per_device_batch_size": 0},
    "no expert is dropped": {"capacity_factor": -1.0, "ragged_buffer_factor": -2.0},
    "less than a row on each device": {"per_device_batch_size": 0.25},
    "no momentum, no decay, no step": {"adam_b1": 0.0, "adam_weight_decay": 0.0, "learning_rate": 0.0, "steps": 0},
    "data from this process": {"grain_worker_count": 0, "grain_worker_count_eval": -1},
    "no limit": {"max_segments_per_seq": -1, "packing_max_segments_per_sample": -5, "gradient_clipping_threshold": 0.0},
    "any seed": {"init_weights_seed": -7, "data_shuffle_seed": 2**40},
    "large, though not in 32 bits": {"prefix_caching_hbm_byte": 10**12, "cost_estimate_flops_fwd": 10**15},
    "text": {"weight_sparsity_n": None, "run_name": "nan", "steps": "none"},
}


@pytest.mark.parametrize("keys", MEANINGS.values(), ids=MEANINGS.keys())
def test_a_number_that_maxtext_gives_a_meaning_is_accepted(fields, keys):
  assert ranges.problems(fields, keys) == []


def test_every_number_is_bounded_or_of_a_kind_that_has_no_bounds(fields):
  numeric = {key: allowed for key, field in fields.items() if (allowed := ranges.range_of(key, field)) is not None}
  assert len(numeric) > 300
  for (key, allowed), value in itertools.product(numeric.items(), BAD):
    (problem,) = ranges.problems(fields, {key: value}) or [None]
    if problem is not None:
      assert problem.startswith(f"{key}={value} ") and problem.endswith(".")
    elif not math.isfinite(float(value)):
      pytest.fail(f"{key}={value} is accepted")
    elif value == -3:
      assert allowed.least == -math.inf, key
    else:
      assert allowed.most == math.inf, key

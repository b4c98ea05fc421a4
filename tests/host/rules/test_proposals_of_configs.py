# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""What messages propose for sizes that do not fit together is accepted when it is typed in: every remedy they name."""

import random
import re

import pytest

from maxtext_pp_ext.plan import check
from tests.host.common import TINY
from tests.marks import slow_but

EXPERTS = {"num_experts": "4", "num_experts_per_tok": "2", "base_moe_mlp_dim": "32"}
MODELS = (
    {},
    {"fused_qkv": "True"},
    EXPERTS | {"decoder_block": "mixtral", "sparse_matmul": "True", "ici_expert_parallelism": "2"},
    EXPERTS | {"decoder_block": "gpt_oss", "inhomogeneous_layer_cycle_interval": "2"},
    EXPERTS | {"decoder_block": "deepseek", "first_num_dense_layers": "1", "attention_type": "mla"},
)


def drawn(source):
  """(keys of a run, the number of devices; None for as many as its parallelism makes)."""
  values = {
      "ici_pipeline_parallelism": source.choice((-1, 2, 3, 4, 5, 8)),
      "ici_fsdp_parallelism": source.choice((-1, -1, 2, 3)),
      "ici_tensor_parallelism": source.choice((1, 1, 1, 3)),
      "base_num_decoder_layers": source.choice((7, 8, 9, 12, 14, 24)),
      "num_pipeline_microbatches": source.choice((-1, 2, 5, 6, 8)),
      "num_pipeline_repeats": source.choice((-1, -1, 2)),
      "num_layers_per_pipeline_stage": source.choice((1, 1, 2, 3)),
      "per_device_batch_size": source.choice((0.5, 1, 1.5, 2, 4)),
      "pipeline_delay_activation_forwarding": source.choice(("True", "False")),
      "pipeline_impl": "circular_bsw",
  }
  if source.random() < 0.3:
    values |= {"eval_interval": 5, "eval_per_device_batch_size": source.choice((0.5, 1, 3))}
  if source.random() < 0.2:
    values |= {"enable_rampup_batch_size": "True", "per_device_batch_size": 4}
    values |= {"per_device_batch_size_start": source.choice((0.5, 1, 2)), "per_device_batch_size_increment": 1}
  values = dict(key.split("=", 1) for key in TINY) | values | source.choice(MODELS)
  return values, source.choice((None, 6, 7, 8, 12, 16))


def remedies(errors):
  """The settings of each remedy that the errors name."""
  for text in re.findall(
      r"(?:Set(?:, together:)?|Without a pipeline:) (\w+=[^ ]+(?:,? (?:or )?\w+=[^ ]+| \(.*?\)| for \w+)*)",
      " ".join(errors),
  ):
    for remedy in text.split(" or "):
      yield {key: value.rstrip(".,") for key, value in re.findall(r"(\w+)=([^ ]+)", remedy)}


def proposed(values, devices):
  """How many remedies are named for what is wrong with a run; an assertion fails if one is refused."""
  arguments = lambda values: [f"{key}={value}" for key, value in values.items()]
  errors = check.check(arguments(values), devices).errors
  if not errors or any("No pipeline of this model fits" in error or "No sizes fit" in error for error in errors):
    return 0
  found = list(remedies(errors))
  assert found, errors
  for remedy in found:
    assert check.check(arguments(values | remedy), devices).errors == [], (remedy, errors)
  return len(found)


def test_what_is_proposed_is_accepted(installed):
  source = random.Random(0)
  assert sum(proposed(*drawn(source)) > 0 for _ in range(8)) > 4


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 5))
def test_what_is_proposed_for_many_configs_is_accepted(installed, seed):
  source = random.Random(seed)
  assert sum(proposed(*drawn(source)) > 0 for _ in range(24)) > 12


EIGHT_LAYERS = dict(key.split("=", 1) for key in TINY) | {"base_num_decoder_layers": 8}
ASKED = {
    "stages that nobody counts": ({"pipeline_impl": "circular_bsw", "ici_pipeline_parallelism": -1}, None),
    "stages that nobody counts, of MaxText's own": ({"ici_pipeline_parallelism": -1}, None),
    "such stages with FSDP": (
        {"pipeline_impl": "circular", "ici_pipeline_parallelism": -1, "ici_fsdp_parallelism": 2},
        None,
    ),
    "such stages on eight devices": ({"pipeline_impl": "circular", "ici_pipeline_parallelism": -1}, 8),
    "three devices of eight": ({"ici_tensor_parallelism": 3}, 8),
    "three of eight and a window": ({"ici_tensor_parallelism": 3, "pipeline_impl": "circular"}, 8),
    "three of eight and MaxText's pipeline": ({"ici_tensor_parallelism": 3, "ici_pipeline_parallelism": 2}, 8),
    "the rest twice": ({"ici_fsdp_parallelism": -1, "ici_data_parallelism": -1}, 8),
    "seven devices": ({"ici_pipeline_parallelism": 4, "pipeline_impl": "circular_bsw"}, 7),
}


QUICK = ("stages that nobody counts", "such stages on eight devices", "three of eight and a window", "the rest twice")
QUICK += ("seven devices",)


@pytest.mark.parametrize("keys, devices", slow_but(QUICK, ASKED, spread=True))
def test_devices_that_cannot_be_shared_out_are_told_with_keys_and_a_remedy_that_is_accepted(installed, keys, devices):
  values = EIGHT_LAYERS | keys
  *_, error = errors = check.check([f"{key}={value}" for key, value in values.items()], devices).errors
  assert any(f"{key}={value}" in error for key, value in keys.items() if key != "pipeline_impl")
  assert "Unspecified value" not in str(errors) and "unspecified" not in str(errors)
  assert proposed(values, devices)
  if devices == 7:
    assert "That leaves 1 of 8 layers out of the pipeline" in error and "Without a pipeline: " in error

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""MaxText's own config accepts the settings proposed for sizes that do not fit together, and its mesh can be made."""

import random

import pytest

from maxtext_pp_ext import config as keys
from maxtext_pp_ext.host.models import abstract_model, run_config
from maxtext_pp_ext.host.rules import problems
from tests.host.common import TINY
from tests.host.rules.test_problems import values_to_set

EXPERTS = {"num_experts": "4", "num_experts_per_tok": "2", "base_moe_mlp_dim": "32"}
MODELS = (
    {},
    {"fused_qkv": "True"},
    EXPERTS | {"decoder_block": "mixtral", "sparse_matmul": "True", "ici_expert_parallelism": "2"},
    EXPERTS | {"decoder_block": "gpt_oss", "inhomogeneous_layer_cycle_interval": "2"},
    EXPERTS | {"decoder_block": "deepseek", "first_num_dense_layers": "1", "attention_type": "mla"},
)


def drawn(source):
  """Arguments of a run on devices that this machine does not have."""
  stages = source.choice((2, 3, 4, 5, 8))
  values = {
      "internal_compile": "True",
      "internal_compile_num_devices": source.choice((6, 8, 12, 16)),
      "ici_pipeline_parallelism": stages,
      "ici_fsdp_parallelism": source.choice((-1, -1, 2, 3)),
      "base_num_decoder_layers": source.choice((8, 9, 12, 14, 24)),
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
  return dict(key.split("=", 1) for key in TINY) | values | source.choice(MODELS)


def check(values):
  """Whether there was a proposal; an assertion fails if MaxText refuses it."""
  try:
    read(values)
    return False
  except keys.PipelineConfigError as error:
    said = error.problems
  if "No pipeline of this model fits" in said[-1]:
    return False
  read(values | values_to_set(said))
  return True


def read(values):
  """Raises ValueError if the mesh of all devices cannot be made, either."""
  config = run_config.read([f"{key}={value}" for key, value in values.items()])
  found = problems.problems(config, whole_mesh=True)
  if found:
    raise keys.PipelineConfigError(found)
  assert abstract_model.abstract_mesh(config).size == config.num_target_devices


def test_maxtext_accepts_what_is_proposed(installed):
  source = random.Random(0)
  assert sum(check(drawn(source)) for _ in range(12)) > 6


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 5))
def test_maxtext_accepts_what_is_proposed_for_many_configs(installed, seed):
  source = random.Random(seed)
  assert sum(check(drawn(source)) for _ in range(24)) > 12

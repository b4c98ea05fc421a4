# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The same numbers on every mesh: pipelines on 8 devices equal their layers on one."""

import pytest

from maxtext_pp_ext.sharding.constrain import is_explicit
from maxtext_pp_ext.testing import parity
from tests.marks import slow_but
from tests.parity.blocks import PIPELINED
from tests.trainer.cases import OTHERS

# name: (block, keys); FSDP takes the devices that are left.
MESHES = {
    "stage 4, fsdp 2": ("llama2", {"stages": 4}),
    "stage 4, fsdp 2, experts": ("mixtral", {"stages": 4}),
    "stage 4, tensor 2": ("llama2", {"stages": 4, "ici_tensor_parallelism": 2}),
    "stage 2, expert 4": ("mixtral", {"stages": 2, "ici_expert_parallelism": 4}),
    "stage 2, fsdp 2, expert 2": ("deepseek", {"stages": 2, "ici_expert_parallelism": 2}),
    "stage 4, context 2": ("llama2", {"stages": 4, "ici_context_parallelism": 2}),
    "stage 2, context 2, fsdp 2": ("mixtral", {"stages": 2, "ici_context_parallelism": 2}),
    "stage 2, data 2, fsdp 2": ("llama2", {"stages": 2, "ici_data_parallelism": 2}),
    "stage 2, fsdp 2, tensor 2": ("mixtral", {"stages": 2, "ici_tensor_parallelism": 2}),
    "stage 2, fsdp 2, fsdp_transpose 2": ("llama2", {"stages": 2, "ici_fsdp_transpose_parallelism": 2}),
    "stage 3, tensor 2": ("llama2", {"stages": 3, "ici_tensor_parallelism": 2}),
    "stage 2, data 2, tensor 2, rules pipeline-large-moe": (
        "deepseek",
        {
            "stages": 2,
            "custom_mesh_and_rule": "pipeline-large-moe",
            "ici_data_parallelism": 2,
            "ici_tensor_parallelism": 2,
        },
    ),
    "stage 2, fsdp 2, expert 2, rules pipeline-large-moe": (
        "deepseek",
        {"stages": 2, "custom_mesh_and_rule": "pipeline-large-moe", "ici_expert_parallelism": 2},
    ),
}
# Of axes that no other quick test in `tests/parity` has.
QUICK, QUICK_EXPLICIT = ["stage 3, tensor 2"], ["stage 2, fsdp 2, fsdp_transpose 2"]


def check(name, implementations, **keys):
  block, mesh = MESHES[name]
  [case] = [case for case in PIPELINED if case.name == block]
  config = case.config(repeats=2, microbatches=mesh["stages"], **mesh, **keys)
  mesh = parity.mesh_of(config)
  assert is_explicit(mesh) == (keys.get("shard_mode") == "explicit")
  parity.assert_pipeline_parity(None, config, implementations=implementations, mesh=mesh)


@pytest.mark.parametrize("name", slow_but(QUICK, list(MESHES)))
def test_a_pipeline_on_a_mesh_equals_its_layers_on_one_device(name):
  check(name, "circular_bsw")


@pytest.mark.slow
@pytest.mark.parametrize("name", MESHES)
def test_the_other_implementations_on_a_mesh_equal_their_layers_on_one_device(name):
  check(name, OTHERS)


# YaRN with layers outside the pipeline, such as DeepSeek's first, is refused (tests/host/rules/test_problems.py).
EXPLICIT = {"shard_mode": "explicit", "rope_type": "default"}


@pytest.mark.parametrize("name", slow_but(QUICK_EXPLICIT, list(MESHES)))
def test_a_pipeline_on_an_explicit_mesh_equals_its_layers_on_one_device(name):
  check(name, "circular_bsw", **EXPLICIT)


@pytest.mark.slow
@pytest.mark.parametrize("name", MESHES)
def test_the_other_implementations_on_an_explicit_mesh_equal_their_layers_on_one_device(name):
  check(name, OTHERS, **EXPLICIT)

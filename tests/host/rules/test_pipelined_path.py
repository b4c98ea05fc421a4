# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of the models that are refused because MaxText's pipelined path would lose something, and of the reasons."""

import inspect
import re
import types

import pytest

from maxtext_pp_ext.host.rules import meshes, pipelined_path

TWO_SLICES = {"dcn_pipeline_parallelism": 2, "dcn_parallelism": [1, 2, 1]}


def make(**overrides):
  values = {
      "decoder_block": "llama2",
      "num_decoder_layers": 8,
      "num_layers_per_pipeline_stage": 1,
      "pipeline_parallel_layers": -1,
      "first_num_dense_layers": 0,
      "scan_layers_per_stage": False,
      "record_internal_nn_metrics": 0,
      "scan_layers": True,
      "inhomogeneous_layer_cycle_interval": 1,
      "nope_layer_interval": -1,
      "interleave_moe_layer_step": 1,
      "engram_layers": [],
      "use_batch_split_schedule": False,
      "batch_split_factor": 2,
      "num_experts": 1,
      "load_balance_loss_weight": 0.0,
      "mtp_num_layers": 0,
      "quantization": "",
      "te_moe_block": False,
      "use_qk_clip": False,
      "micro_batch_size_to_train_on": 16,
      "num_pipeline_microbatches": 4,
      "per_device_batch_size": 2.0,
      "num_target_devices": None,
      "mhc_expansion_rate": 1,
      "use_lineage": False,
      "use_m3_model": False,
      "use_multimodal": False,
      "use_mrope": False,
      "deepstack_visual_indexes_for_vit": [],
      "lora": types.SimpleNamespace(enable_lora=False),
      "distill_beta": 0.0,
      "logical_axis_rules": [("activation_batch", ["data", "fsdp"]), ("activation_stage", "stage"), ("embed", None)],
      "enable_multi_tier_checkpointing": False,
      "mtc_data_parallelism": 0,
      "ici_pipeline_parallelism": 4,
      "dcn_pipeline_parallelism": 1,
      "mesh_axes": ["data", "stage", "fsdp"],
      "ici_parallelism": [1, 4, 2],
      "dcn_parallelism": [1, 1, 1],
      "inference_benchmark_test": False,
      "weight_dtype": "float32",
      "rope_type": "default",
      "shard_mode": "auto",
      "custom_mesh_and_rule": "",
  }
  assert set(overrides) <= {*values, "prefetch_fsdp_weights", "gradient_accumulation_schedule"}
  return types.SimpleNamespace(**(values | overrides))


@pytest.mark.parametrize("block", sorted(pipelined_path.UNIFORM_BLOCKS))
@pytest.mark.parametrize("scan", [True, False])
def test_blocks_with_equal_layers_are_accepted(block, scan):
  assert list(pipelined_path.problems(make(decoder_block=block, scan_layers=scan))) == []


@pytest.mark.parametrize(
    "model, reason",
    [
        ({"decoder_block": "gemma3", "num_decoder_layers": 6}, "cycles of 6"),
        ({"decoder_block": "gemma3", "scan_layers": False}, "every 6th layer has global attention"),
        ({"decoder_block": "gemma4"}, "bypasses the pipeline"),
        ({"decoder_block": "gemma4_small"}, "share keys and values"),
        ({"decoder_block": "deepseek4"}, "differ by index"),
        (
            {"decoder_block": "gpt_oss", "inhomogeneous_layer_cycle_interval": 2},
            "interval=2, and a stage has to hold whole",
        ),
        (
            {"decoder_block": "olmo3", "inhomogeneous_layer_cycle_interval": 4},
            "interval=4, and a stage has to hold whole",
        ),
        (
            {"decoder_block": "qwen3_next", "inhomogeneous_layer_cycle_interval": 4},
            "interval=4, and a stage has to hold whole",
        ),
        (
            {"decoder_block": "qwen3_5", "inhomogeneous_layer_cycle_interval": 4},
            "interval=4, and a stage has to hold whole",
        ),
        ({"decoder_block": "gpt_oss", "scan_layers": False}, "without attention_type"),
        ({"decoder_block": "qwen3_next", "scan_layers": False}, "without layer_idx"),
        (
            {"decoder_block": "llama4", "inhomogeneous_layer_cycle_interval": 4},
            "interval=4, and a stage has to hold whole",
        ),
        ({"decoder_block": "llama4", "scan_layers": False, "nope_layer_interval": 4}, "nope_layer_interval=4"),
        ({"decoder_block": "llama4", "scan_layers": False}, "without MoE"),
        (
            {"decoder_block": "gpt_oss", "inhomogeneous_layer_cycle_interval": 2, "num_layers_per_pipeline_stage": 3},
            "num_layers_per_pipeline_stage=2 or a multiple",
        ),
        (
            {
                "decoder_block": "gpt_oss",
                "inhomogeneous_layer_cycle_interval": 2,
                "num_layers_per_pipeline_stage": 2,
                "pipeline_parallel_layers": 4,
            },
            "each of the 4 layers outside",
        ),
        ({"decoder_block": "envy", "scan_layers": False, "interleave_moe_layer_step": 2}, "without MoE"),
        ({"decoder_block": "not_invented_yet"}, "does not know it"),
    ],
)
def test_blocks_whose_layers_differ_by_index_are_refused_with_the_reason(model, reason):
  [problem] = pipelined_path.problems(make(**model))
  assert reason in problem and f"decoder_block={model['decoder_block']}" in problem


@pytest.mark.parametrize(
    "model",
    [
        {"decoder_block": "gemma3", "num_decoder_layers": 5},
        {"decoder_block": "gpt_oss"},
        {"decoder_block": "qwen3_5"},
        {"decoder_block": "gemma3", "num_decoder_layers": 24, "num_layers_per_pipeline_stage": 12},
        {"decoder_block": "gpt_oss", "inhomogeneous_layer_cycle_interval": 2, "num_layers_per_pipeline_stage": 4},
        {"decoder_block": "envy", "inhomogeneous_layer_cycle_interval": 2, "num_layers_per_pipeline_stage": 2},
        {"decoder_block": "llama4", "nope_layer_interval": 4},
        {"decoder_block": "llama4", "scan_layers": False, "interleave_moe_layer_step": 9},
        {"decoder_block": "envy", "scan_layers": False, "interleave_moe_layer_step": 9},
    ],
)
def test_what_is_built_alike_with_and_without_a_pipeline_is_not_refused(model):
  assert list(pipelined_path.problems(make(**model))) == []


def problems(**keys):
  config = make(**keys)
  return [*pipelined_path.problems(config), *meshes.problems(config)]


@pytest.mark.parametrize(
    "feature",
    [
        {"engram_layers": [1, 3]},
        {"use_lineage": True},
        {"use_m3_model": True},
        {"prefetch_fsdp_weights": True},
        {"gradient_accumulation_schedule": "dual_pipe"},
        {"lora": types.SimpleNamespace(enable_lora=True)},
        {"distill_beta": 0.5},
        {"weight_dtype": "float8_e4m3fn"},
        {"inhomogeneous_layer_cycle_interval": 2},
        {"enable_multi_tier_checkpointing": True, **TWO_SLICES},
        {"inference_benchmark_test": True, **TWO_SLICES},
        {"ici_parallelism": [4, 1, 2]},
        {"mhc_expansion_rate": 4},
        {"use_multimodal": True, "deepstack_visual_indexes_for_vit": [1]},
        {"use_multimodal": True, "use_mrope": True},
        {"use_multimodal": True, "decoder_block": "gemma3", "num_decoder_layers": 4},
    ],
)
def test_features_that_the_pipelined_path_does_not_have_are_refused_by_name(feature):
  [problem] = problems(**feature)
  assert any(re.search(rf"\b{key}(\.\w+)?=", problem) for key in feature)


@pytest.mark.parametrize("axes", ["stage", ["data", "stage", "fsdp"]])
def test_rules_that_shard_what_a_stage_computes_on_over_stages_are_refused_by_name(axes):
  [problem] = problems(logical_axis_rules=[("activation_batch", axes), ("layers", "stage")])
  assert "shard activation_batch over the mesh axis 'stage'" in problem


@pytest.mark.parametrize(
    "feature",
    [
        {"use_mrope": True},
        {"use_multimodal": True},
        {"deepstack_visual_indexes_for_vit": [1]},
        {"enable_multi_tier_checkpointing": True},
        {"enable_multi_tier_checkpointing": True, "mtc_data_parallelism": 2, **TWO_SLICES},
        {"inhomogeneous_layer_cycle_interval": 2, "scan_layers": False},
    ],
)
def test_features_that_lose_nothing_by_themselves_are_not_refused(feature):
  assert problems(**feature) == []


BATCH_SPLIT = {"decoder_block": "deepseek", "num_experts": 8, "use_batch_split_schedule": True}


@pytest.mark.parametrize("keys", [{}, {"batch_split_factor": 4}, {"num_pipeline_microbatches": -1}])
def test_the_batch_split_schedule_of_deepseek_is_accepted(keys):
  assert list(pipelined_path.problems(make(**BATCH_SPLIT, **keys))) == []


@pytest.mark.parametrize(
    "keys, named",
    [
        ({"decoder_block": "mixtral"}, "decoder_block=mixtral"),
        ({"num_experts": 1}, "num_experts=1"),
        ({"load_balance_loss_weight": 0.1}, "Set load_balance_loss_weight=0,"),
        ({"mtp_num_layers": 1}, "Set mtp_num_layers=0,"),
        ({"quantization": "fp8_full"}, 'Set quantization="",'),
        ({"te_moe_block": True}, "Set te_moe_block=False,"),
        ({"use_qk_clip": True}, "Set use_qk_clip=False,"),
        ({"batch_split_factor": 0}, "batch_split_factor=0"),
        ({"batch_split_factor": 3}, "a microbatch of 4 rows"),
    ],
)
def test_what_the_batch_split_schedule_excludes_is_refused_by_name(keys, named):
  (problem,) = pipelined_path.problems(make(**(BATCH_SPLIT | keys)))
  assert named in problem and "use_batch_split_schedule=True" in problem and "use_batch_split_schedule=False" in problem


METRICS = {"record_internal_nn_metrics": 1}
DENSE_FIRST = {"decoder_block": "deepseek", "num_decoder_layers": 23, "first_num_dense_layers": 3}


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"pipeline_parallel_layers": 8},
        {"scan_layers": False},
        {"num_layers_per_pipeline_stage": 2, "scan_layers_per_stage": True},
        DENSE_FIRST | {"pipeline_parallel_layers": 8},
        DENSE_FIRST | {"pipeline_parallel_layers": 16, "scan_layers": False},
    ],
    ids=str,
)
def test_layers_whose_names_are_in_the_order_in_which_they_run_may_have_metrics(keys):
  assert list(pipelined_path.problems(make(**METRICS, **keys))) == []


@pytest.mark.parametrize(
    "keys, message",
    [
        ({"pipeline_parallel_layers": 6}, "2 layers outside.*Set pipeline_parallel_layers=-1,"),
        ({"num_layers_per_pipeline_stage": 2}, "num_layers_per_pipeline_stage=2.*Set scan_layers_per_stage=True,"),
        (DENSE_FIRST | {"pipeline_parallel_layers": 8, "scan_layers": False}, "and 12 layers.*Set scan_layers=True,"),
        (
            {"decoder_block": "gpt_oss", "inhomogeneous_layer_cycle_interval": 2, "num_layers_per_pipeline_stage": 2},
            "cycles of 2: they would",
        ),
    ],
    ids=str,
)
def test_layers_whose_names_are_in_another_order_are_refused_with_metrics(keys, message):
  (problem,) = pipelined_path.problems(make(**METRICS, **keys))
  assert re.search(message, problem) and "record_internal_nn_metrics=1 with" in problem
  assert problem.endswith("record_internal_nn_metrics=0.") and not list(pipelined_path.problems(make(**keys)))


def test_every_decoder_block_of_maxtext_is_judged():
  from maxtext.common.common_types import DecoderBlockType

  for block in DecoderBlockType:
    assert not any("does not know it" in problem for problem in pipelined_path.problems(make(decoder_block=block))), block


def test_layers_of_maxtext_take_their_index_as_this_module_says():
  """If MaxText changes these, the tests above have to be reviewed."""
  from maxtext.models import deepseek4, envy, gemma3, gemma4, gpt_oss, llama4, olmo3, qwen3, qwen3_5

  def default(cls, name):
    return inspect.signature(cls.__init__).parameters[name].default

  required = inspect.Parameter.empty
  assert default(gpt_oss.GptOssDecoderLayer, "attention_type") is required
  assert default(olmo3.Olmo3DecoderLayer, "attention_type") is required
  assert default(qwen3.Qwen3NextDecoderLayer, "layer_idx") is required
  assert default(qwen3_5.Qwen3_5DecoderLayer, "layer_idx") is required
  assert default(gemma3.Gemma3DecoderLayer, "attention_type").name == "LOCAL_SLIDING"
  pattern = [kind.name for kind in gemma3.GEMMA3_ATTENTION_PATTERN]
  assert pattern == ["LOCAL_SLIDING"] * 5 + ["GLOBAL"]
  assert default(gemma4.Gemma4ScannableBlock, "num_of_layers") == 6
  assert default(llama4.Llama4DecoderLayer, "is_nope_layer") is False
  assert default(llama4.Llama4DecoderLayer, "is_moe_layer") is False
  assert default(llama4.Llama4ScannableBlock, "nope_layer_interval") == 1
  assert default(llama4.Llama4ScannableBlock, "interleave_moe_layer_step") == 1
  assert default(envy.EnvyDecoderLayer, "is_moe_layer") is False
  assert default(envy.EnvyScannableBlock, "interleave_moe_layer_step") == 2
  assert default(deepseek4.DeepSeek4DecoderLayer, "layer_idx") == -1


def test_blocks_with_equal_layers_take_no_index():
  from maxtext.layers import nnx_decoders

  known = {"config", "mesh", "model_mode", "quant", "rngs", "name", "self", "layer_idx"}
  for block in pipelined_path.UNIFORM_BLOCKS:
    config = make(decoder_block=nnx_decoders.DecoderBlockType(block))
    decoder = types.SimpleNamespace(config=config)
    for cls in nnx_decoders.NNXDecoder.get_decoder_layers(decoder):
      taken = set(inspect.signature(cls.__init__).parameters)
      assert taken <= known and ("layer_idx" not in taken or block == "deepseek"), (block, taken)

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of `maxtext_pp_ext.config` on plain objects: what is refused, and that the proposed settings are right.

That MaxText's config class asks it is tested in `tests/host/replacements/test_config_class.py`.
"""

import ast
import pickle
import re
import types

from hypothesis import given
from hypothesis import strategies as st
import pytest

from maxtext_pp_ext import config as keys
from maxtext_pp_ext.host.rules import problems

RULES = [(f"activation_{name}", ["data", "fsdp"]) for name in ("batch", "kv_batch", "batch_attn")]
RULES += [("activation_embed_and_logits_batch", ["data", "stage", "fsdp"]), ("activation_kv_heads", ["tensor"])]


def make(**overrides):
  """A config without problems: 8 layers on 4 stages, 8 microbatches, 2 repeats."""
  values = {
      "pipeline_impl": "circular_bsw",
      "pipeline_grad_accum_dtype": "auto",
      "pipeline_gather_dtype": "auto",
      "pipeline_remat_iterations": 0,
      "pipeline_remat_tensors": "",
      "remat_policy": "full",
      "set_remat_policy_on_pipeline_iterations": True,
      "tensors_on_device": ["context"],
      "tensors_to_offload": None,
      "sharding_conflicts": "fallback",
      "ici_pipeline_parallelism": 4,
      "dcn_pipeline_parallelism": 1,
      "ici_fsdp_parallelism": -1,
      "ici_tensor_parallelism": 1,
      "num_layers_per_pipeline_stage": 1,
      "num_pipeline_repeats": 2,
      "pipeline_parallel_layers": 8,
      "num_decoder_layers": 8,
      "first_num_dense_layers": 0,
      "decoder_block": "llama2",
      "num_pipeline_microbatches": 8,
      "pipeline_delay_activation_forwarding": False,
      "pipeline_fsdp_ag_once": False,
      "pipeline_fsdp_ag_per_repeat": False,
      "micro_batch_size_to_train_on": 16,
      "num_target_devices": 8,
      "per_device_batch_size": 2.0,
      "eval_interval": -1,
      "eval_per_device_batch_size": 2.0,
      "micro_batch_size_to_eval_on": 16,
      "enable_rampup_batch_size": False,
      "per_device_batch_size_start": 4.0,
      "per_device_batch_size_increment": 2.0,
      "num_slices": 1,
      "mesh_axes": ["data", "stage", "fsdp", "tensor"],
      "logical_axis_rules": RULES,
      "logical_axis_rules_for_eval": RULES,
      "input_data_sharding_logical_axes": ["activation_embed_and_logits_batch", "activation_norm_length"],
      "custom_mesh_and_rule": "",
      "custom_mesh_and_rule_for_eval": "",
      "quantization": "",
      "use_qwix_quantization": False,
      "quantization_local_shard_count": 8,
      "shard_mode": "auto",
      "routed_bias": False,
      "routed_bias_update_rate": 0.0,
      "parameter_memory_host_offload": False,
      "gradient_accumulation_steps": 1,
      "scan_layers_per_stage": False,
      "param_scan_axis": 1,
      "model_name": "default",
      "rope_type": "default",
      "opt_type": "adamw",
      "use_qk_clip": False,
      "scan_layers": True,
      "enable_streaming_diloco": False,
      "fused_qkv": False,
      "num_experts": 1,
      "sparse_matmul": True,
      "shared_experts": 0,
      "mtp_num_layers": 0,
      "attention": "autoselected",
      "inhomogeneous_layer_cycle_interval": 1,
      "engram_layers": [],
      "mhc_expansion_rate": 1,
      "use_lineage": False,
      "moe_dropless_fallback": None,
      "use_m3_model": False,
      "use_batch_split_schedule": False,
      "batch_split_factor": 1,
      "record_internal_nn_metrics": 0,
      "use_multimodal": False,
      "lora": None,
      "distill_beta": 0.0,
      "weight_dtype": "float32",
      "ici_parallelism": None,
      "dcn_parallelism": None,
      "inference_benchmark_test": False,
      "enable_multi_tier_checkpointing": False,
      "mtc_data_parallelism": 0,
      "enable_diloco": False,
      "num_experts_per_tok": 1,
      "max_target_length": 16,
      "enable_checkpointing": True,
      "enable_emergency_checkpoint": False,
      "base_output_directory": "/out",
      "local_checkpoint_directory": "",
  }
  assert not set(overrides) - set(values)
  return types.SimpleNamespace(**(values | overrides))


def only_problem(config):
  [problem] = problems.problems(config)
  return problem


def values_to_set(said):
  """The settings of the first printed remedy, or of the remedy for all problems together."""
  [text] = [match for problem in said for match in re.findall(r"Set(?:, together:)? (\w+=.*)", problem)]
  values = [pair.split("=") for pair in re.match(r"\w+=[^ ,]+(?:, \w+=[^ ,]+)*", text)[0].rstrip(".").split(", ")]
  return {key: value if key == "pipeline_impl" else ast.literal_eval(value) for key, value in values}


def problems_after(config, said, **more):
  """The problems of a config with all proposed settings and all values derived again, as MaxText derives them."""
  values = vars(config) | values_to_set(said) | more
  again = types.SimpleNamespace(**values)
  if again.pipeline_parallel_layers == -1:
    first = again.first_num_dense_layers if again.decoder_block == "deepseek" else 0
    again.pipeline_parallel_layers = again.num_decoder_layers - first
  if again.num_pipeline_microbatches == -1:
    stages = again.ici_pipeline_parallelism * again.dcn_pipeline_parallelism
    again.num_pipeline_microbatches = stages * (2 if again.pipeline_delay_activation_forwarding else 1)
  for key, rows in (
      ("per_device_batch_size", "micro_batch_size_to_train_on"),
      ("eval_per_device_batch_size", "micro_batch_size_to_eval_on"),
  ):
    if values[key] != getattr(config, key):
      setattr(again, rows, int(again.num_target_devices * values[key]))
  return problems.problems(again, whole_mesh=True)


def test_a_sound_configuration_has_no_problems():
  assert problems.problems(make()) == []


def test_axes_over_slices_where_there_is_one_slice_are_refused_with_their_keys():
  over = {"ici_pipeline_parallelism": 2, "dcn_pipeline_parallelism": 2}
  [problem] = problems.problems(make(**over))
  assert problem.startswith("dcn_pipeline_parallelism=2 needs more slices than there are (num_slices=1). Set")
  assert "dcn_pipeline_parallelism=1" in problem.partition("Set")[2]
  assert not problems.problems(make(**over, num_slices=2))
  # MaxText's own pipelines are MaxText's to judge; its RLConfig has one slice wherever it is not told.
  assert not problems.problems(make(**over, pipeline_impl="host"))


@pytest.mark.parametrize(
    "sound",
    [
        {"ici_pipeline_parallelism": 2, "dcn_pipeline_parallelism": 2, "num_slices": 2},
        {"num_layers_per_pipeline_stage": 2, "num_pipeline_repeats": 1},
        {"num_pipeline_repeats": -1, "pipeline_parallel_layers": -1, "num_pipeline_microbatches": -1},
        {"num_decoder_layers": 10},  # two layers outside the pipeline
        {"pipeline_delay_activation_forwarding": True},
        {"decoder_block": "deepseek", "num_decoder_layers": 11, "first_num_dense_layers": 3},
        {"pipeline_impl": "circular", "pipeline_gather_dtype": "weight", "pipeline_grad_accum_dtype": "float32"},
        {"quantization": "fp8"},
        {"quantization": "nanoo_fp8"},
        {"quantization": "int8", "use_qwix_quantization": True},
        {"quantization": "int8", "quantization_local_shard_count": 2},
        {"quantization": "int8", "quantization_local_shard_count": 0},
        {"num_decoder_layers": None, "micro_batch_size_to_train_on": None, "pipeline_parallel_layers": -1},  # not derived
    ],
)
def test_what_is_sound_is_not_refused(sound):
  assert problems.problems(make(**sound)) == []


FSDP_ONLY = [(f"activation_{name}", ["fsdp"]) for name in ("batch", "kv_batch", "embed_and_logits_batch")]
OTHER_RULES = {
    "eval_interval": 1,
    "custom_mesh_and_rule_for_eval": "pure-fsdp",
    "logical_axis_rules_for_eval": FSDP_ONLY,
}
LAYERS_BEFORE = {"decoder_block": "deepseek", "num_decoder_layers": 11, "first_num_dense_layers": 3}


@pytest.mark.parametrize(
    "keys, says, remedies",
    [
        (
            LAYERS_BEFORE | OTHER_RULES,
            "the 3 layers before the pipeline",
            "custom_mesh_and_rule_for_eval='' or eval_interval=-1",
        ),
        (
            {"shard_mode": "explicit", **OTHER_RULES},
            "shard_mode=explicit, by the rules of training",
            "custom_mesh_and_rule_for_eval='' or eval_interval=-1 or shard_mode=auto",
        ),
        (
            LAYERS_BEFORE | {"input_data_sharding_logical_axes": ["activation_batch", "activation_length"]},
            "=['activation_batch', 'activation_length']: tokens are not sharded over stage",
            "a first axis whose rule in logical_axis_rules has stage, too",
        ),
    ],
)
def test_tokens_that_are_laid_out_otherwise_than_their_embeddings_are_refused_where_xla_would_die(keys, says, remedies):
  problem = only_problem(make(**keys))
  assert says in problem and f"Set {remedies}." in problem


@pytest.mark.parametrize("keys", [OTHER_RULES, LAYERS_BEFORE | OTHER_RULES | {"eval_interval": -1}])
def test_rules_for_evaluations_of_their_own_are_not_refused_where_a_pipeline_keeps_tokens_and_embeddings_alike(keys):
  assert problems.problems(make(**keys)) == []


def test_the_hosts_own_keys_are_not_judged_for_the_hosts_own_pipeline():
  wrong = {"ici_pipeline_parallelism": 3, "num_pipeline_microbatches": 7, "pipeline_fsdp_ag_per_repeat": True}
  assert problems.problems(make(pipeline_impl="host", **wrong)) == []


@pytest.mark.parametrize(
    "key, value",
    [
        ("pipeline_gather_dtype", "compute"),
        ("pipeline_grad_accum_dtype", "float32"),
        ("pipeline_remat_iterations", 4),
        ("pipeline_remat_tensors", "mlpwi_0"),
    ],
)
def test_a_key_of_ours_that_would_have_no_effect_is_refused(key, value):
  assert f"{key}={value} has no effect with pipeline_impl=host" in only_problem(
      make(pipeline_impl="host", **{key: value})
  )


@pytest.mark.parametrize("value", ["float16", "", None])
@pytest.mark.parametrize("key", ["pipeline_gather_dtype", "pipeline_grad_accum_dtype"])
@pytest.mark.parametrize("impl", ["host", "circular"])
def test_a_bad_value_is_refused_with_the_good_ones(impl, key, value):
  problem = only_problem(make(pipeline_impl=impl, **{key: value}))
  assert f"{key}={value!r}" in problem and "'auto'" in problem


PARTLY = {"remat_policy": "minimal", "pipeline_remat_iterations": 4}
REMAT = {
    "as many as there are": ({"pipeline_remat_iterations": 19}, None),
    "negative": ({"pipeline_remat_iterations": -1}, "must be at least 0. Set pipeline_remat_iterations=0."),
    "too many": ({"pipeline_remat_iterations": 20}, "more than the 19 iterations"),
    "nothing is kept": (
        {"remat_policy": "full"},
        "remat_policy=full keeps only layers' inputs. Leave pipeline_remat_iterations out",
    ),
    "no policy": ({"remat_policy": "none"}, "remat_policy=none"),
    "everything is kept": (
        {"set_remat_policy_on_pipeline_iterations": False},
        "set_remat_policy_on_pipeline_iterations=False keeps everything in all iterations. Set it to True",
    ),
    "tensors without iterations": (
        {"pipeline_remat_iterations": 0, "pipeline_remat_tensors": "mlpwi_0"},
        "pipeline_remat_tensors=mlpwi_0 has no effect with pipeline_remat_iterations=0",
    ),
    "what is kept": ({"remat_policy": "custom", "pipeline_remat_tensors": "context"}, None),
    "what is not kept": (
        {"remat_policy": "custom", "pipeline_remat_tensors": "context, mlpwi_0"},
        "remat_policy=custom does not keep mlpwi_0, only context. Set pipeline_remat_tensors",
    ),
    "inputs": ({"remat_policy": "custom", "tensors_on_device": ["decoder_layer_input"]}, "keeps only layers' inputs"),
    "a window's layers": (
        {"ici_pipeline_parallelism": 1, "num_pipeline_repeats": -1, "pipeline_remat_iterations": 64},
        None,
    ),
    "more than a window's layers": (
        {"ici_pipeline_parallelism": 1, "num_pipeline_repeats": -1, "pipeline_remat_iterations": 65},
        "more than the 64 iterations",
    ),
}


@pytest.mark.parametrize("keys, said", REMAT.values(), ids=REMAT.keys())
def test_rematerialisation_in_a_part_of_the_iterations_is_of_what_is_kept(keys, said):
  config = make(**(PARTLY | keys))
  if said is None:
    assert problems.problems(config) == []
  else:
    assert said in only_problem(config)


def test_an_unknown_implementation_is_refused_with_the_nearest():
  assert "did you mean 'circular_bsw'" in only_problem(make(pipeline_impl="circular_bws"))


@pytest.mark.parametrize("name", [None, ""])
def test_no_implementation_at_all_is_refused_with_the_known_ones(name):
  assert "'host', 'circular'" in only_problem(make(pipeline_impl=name))


WITHOUT_PIPELINE = {"ici_pipeline_parallelism": 1, "num_pipeline_repeats": -1, "num_pipeline_microbatches": -1}
NO_WINDOW = {
    "unscanned": ({"scan_layers": False}, "Set scan_layers=True"),
    "a block that is not scanned over": ({"decoder_block": "gemma4_small"}, "decoder_block=gemma4_small"),
    "too few layers for a block": (
        {"decoder_block": "gemma3", "num_decoder_layers": 5, "pipeline_parallel_layers": 5},
        "blocks of 6",
    ),
    "a schedule of MaxText's": ({"use_batch_split_schedule": True}, "Set use_batch_split_schedule=False"),
    "tokens": ({"engram_layers": [1]}, "Set engram_layers=[]"),
    "parameters on the host": ({"parameter_memory_host_offload": True}, "Set parameter_memory_host_offload=False"),
    "distillation": ({"distill_beta": 0.5}, "Set distill_beta=0"),
    "layers per stage": ({"num_layers_per_pipeline_stage": 2}, "Set num_layers_per_pipeline_stage=1"),
    "pipelined layers": ({"pipeline_parallel_layers": 2}, "Set pipeline_parallel_layers=-1"),
    "repeats": ({"num_pipeline_repeats": 2}, "Set num_pipeline_repeats=-1"),
    "delay": ({"pipeline_delay_activation_forwarding": True}, "Set pipeline_delay_activation_forwarding=False"),
    "parts of the batch": ({"quantization": "int8", "quantization_local_shard_count": 6}, "shard_count=6 parts"),
    "scales of a first call": ({"quantization": "fp8_gpu", "use_qwix_quantization": True}, "Set quantization=fp8"),
    "rows": ({"num_pipeline_microbatches": 3}, "cannot be divided into 3 microbatches"),
}


def test_an_implementation_runs_without_a_pipeline():
  assert problems.problems(make(**WITHOUT_PIPELINE)) == []
  assert problems.problems(make(**WITHOUT_PIPELINE | {"num_pipeline_microbatches": 2})) == []


@pytest.mark.parametrize("keys, words", NO_WINDOW.values(), ids=NO_WINDOW.keys())
def test_what_has_no_window_without_a_pipeline_is_refused_with_what_to_set(keys, words):
  assert words in only_problem(make(**WITHOUT_PIPELINE | keys))


@pytest.mark.parametrize("keys", [{"opt_type": "muon"}, {"record_internal_nn_metrics": 1}])
def test_what_only_pipelines_cannot_do_is_allowed_without_one(keys):
  assert problems.problems(make(**WITHOUT_PIPELINE | keys)) == []


@pytest.mark.parametrize("key", ["ici_pipeline_parallelism", "dcn_pipeline_parallelism"])
@pytest.mark.parametrize("value", [-1, 0])
def test_a_number_of_stages_that_is_to_be_derived_is_refused(key, value):
  assert f"{key}={value}" in only_problem(make(**{key: value}))


@pytest.mark.parametrize("key", ["pipeline_fsdp_ag_once", "pipeline_fsdp_ag_per_repeat"])
def test_a_host_key_that_contradicts_is_refused(key):
  problem = only_problem(make(**{key: True}))
  assert f"{key}=True" in problem and f"Set {key}=False" in problem
  assert problems.problems(make(**{key: False})) == []


def test_layers_that_cannot_be_divided_are_refused_with_how_many_can():
  config = make(num_decoder_layers=10, pipeline_parallel_layers=10, num_pipeline_repeats=-1)
  problem = only_problem(config)
  assert "num_decoder_layers=10" in problem and "ici_pipeline_parallelism=4" in problem
  assert "Set pipeline_parallel_layers=8 (the other 2" in problem
  assert problems.problems(make(num_decoder_layers=10, pipeline_parallel_layers=8, num_pipeline_repeats=-1)) == []


def test_fewer_layers_than_stages_are_refused():
  assert "are fewer than" in only_problem(make(num_decoder_layers=2, pipeline_parallel_layers=2, num_pipeline_repeats=-1))


def test_more_pipelined_layers_than_the_model_has_are_refused():
  assert "more than the model has: 4" in only_problem(make(num_decoder_layers=4))


def test_layers_of_deepseek_count_without_the_dense_ones():
  problem = only_problem(make(decoder_block="deepseek", num_decoder_layers=8, first_num_dense_layers=3))
  assert "more than the model has: 5" in problem


def test_repeats_that_do_not_give_the_layers_are_refused_with_the_right_number():
  problem = only_problem(make(num_pipeline_repeats=3))
  assert "num_pipeline_repeats=3" in problem and "is 12" in problem and "Set num_pipeline_repeats=2" in problem


def test_less_than_one_layer_per_stage_is_refused():
  assert "num_layers_per_pipeline_stage=0" in only_problem(make(num_layers_per_pipeline_stage=0))


def test_microbatches_that_are_no_multiple_of_the_stages_are_refused_with_the_nearest_on_both_sides():
  problem = only_problem(make(num_pipeline_microbatches=7))
  assert "num_pipeline_microbatches=7" in problem and "4 stages" in problem
  assert problem.endswith("Set num_pipeline_microbatches=8 or num_pipeline_microbatches=4.")


def test_fewer_microbatches_than_the_delay_needs_are_refused():
  config = make(num_pipeline_microbatches=4, pipeline_delay_activation_forwarding=True)
  problem = only_problem(config)
  assert "fewer than 8 = 2 × 4 stages" in problem and "pipeline_delay_activation_forwarding=True" in problem
  assert "Set num_pipeline_microbatches=8" in problem


@pytest.mark.parametrize("microbatches", [0, -4])
def test_no_microbatches_are_refused(microbatches):
  assert any(
      "num_pipeline_microbatches" in problem
      for problem in problems.problems(make(num_pipeline_microbatches=microbatches))
  )


def test_a_batch_that_cannot_be_divided_is_refused_with_how_it_was_derived():
  problem = only_problem(make(micro_batch_size_to_train_on=20, per_device_batch_size=2.5))
  assert "a batch of 20 rows (int(num_target_devices=8 × per_device_batch_size=2.5))" in problem
  assert "num_pipeline_microbatches=4 or per_device_batch_size=3" in problem


def test_an_empty_batch_is_refused():
  assert "a batch of 0 rows" in only_problem(make(micro_batch_size_to_train_on=0, per_device_batch_size=0.1))


EVALUATION = {"eval_interval": 10, "eval_per_device_batch_size": 1.5, "micro_batch_size_to_eval_on": 12}
GROWING = {"enable_rampup_batch_size": True, "per_device_batch_size": 4.0, "micro_batch_size_to_train_on": 32}


def test_an_evaluation_whose_batch_cannot_be_divided_is_refused_with_what_can():
  problem = only_problem(make(**EVALUATION))
  assert "batch of 12 rows (int(num_target_devices=8 × eval_per_device_batch_size=1.5))" in problem
  assert "Set eval_per_device_batch_size=2 or num_pipeline_microbatches=4 or eval_interval=-1." in problem
  for sound in ({"num_pipeline_microbatches": 4}, {"eval_interval": -1}):
    assert problems.problems(make(**(EVALUATION | sound))) == []


def test_an_evaluation_with_another_batch_that_can_be_divided_is_not_refused():
  assert problems.problems(make(**(EVALUATION | {"micro_batch_size_to_eval_on": 24}))) == []


@pytest.mark.parametrize(
    ("start", "increment", "key"),
    [(0.5, 0.5, "per_device_batch_size_start"), (1.0, 1.5, "per_device_batch_size_increment"), (1.0, 1.0, None)],
)
def test_a_growing_batch_that_cannot_be_divided_at_some_size_is_refused(start, increment, key):
  sizes = {"per_device_batch_size_start": start, "per_device_batch_size_increment": increment}
  found = problems.problems(make(**GROWING, **sizes))
  if key is None:
    assert found == []
  else:
    assert key in found[0]
    assert problems_after(make(**GROWING, **sizes), found) == []
  assert problems.problems(make(**(GROWING | {"enable_rampup_batch_size": False}), **sizes)) == []


def test_each_size_of_a_growing_batch_is_accumulated_in_parts_that_can_be_divided():
  sizes = {"per_device_batch_size_start": 1.0, "per_device_batch_size_increment": 3.0}
  problem = only_problem(make(**GROWING, **sizes, gradient_accumulation_steps=2))
  assert "8 rows" in problem and "gradient_accumulation_steps=2 × num_pipeline_microbatches=8" in problem
  assert "Set per_device_batch_size_start=2" in problem


def test_a_mesh_without_a_stage_axis_is_refused():
  assert "no axis 'stage'" in only_problem(make(mesh_axes=["data", "fsdp"]))


def test_all_problems_are_reported_at_once():
  wrong = {
      "num_pipeline_microbatches": 7,
      "pipeline_fsdp_ag_once": True,
      "pipeline_gather_dtype": "x",
      "pipeline_impl": "y",
  }
  error = keys.PipelineConfigError(problems.problems(make(**wrong)))
  assert len(error.problems) == 4 and str(error).startswith("4 problems")
  assert all(f"{key}=" in str(error) for key in wrong)


def test_the_error_survives_pickling():
  error = keys.PipelineConfigError(["a", "b"])
  again = pickle.loads(pickle.dumps(error))
  assert str(again) == str(error) and again.problems == ("a", "b")


@given(
    stages=st.integers(2, 9),
    microbatches=st.integers(-2, 40),
    delay=st.booleans(),
    devices=st.sampled_from([1, 4, 6, 8, 96]),
    rows=st.integers(0, 64),
    eval_rows=st.integers(0, 64),
)
def test_setting_what_a_message_about_the_batch_names_leaves_no_problem(
    stages, microbatches, delay, devices, rows, eval_rows
):
  config = make(
      ici_pipeline_parallelism=stages,
      num_decoder_layers=12,
      pipeline_parallel_layers=-1,
      num_pipeline_repeats=-1,
      num_pipeline_microbatches=microbatches,
      pipeline_delay_activation_forwarding=delay,
      micro_batch_size_to_train_on=rows,
      num_target_devices=devices,
      per_device_batch_size=rows / devices,
      eval_interval=1,
      micro_batch_size_to_eval_on=eval_rows,
      eval_per_device_batch_size=eval_rows / devices,
  )
  found = problems.problems(config)
  if found and devices > 1:
    assert problems_after(config, found) == []


@given(layers=st.integers(1, 30), stages=st.integers(2, 5), per_stage=st.integers(1, 3), repeats=st.integers(-1, 6))
def test_layers_are_refused_exactly_if_stages_repeats_and_layers_per_stage_do_not_give_them(
    layers, stages, per_stage, repeats
):
  config = make(
      ici_pipeline_parallelism=stages,
      num_decoder_layers=layers,
      pipeline_parallel_layers=layers,
      num_layers_per_pipeline_stage=per_stage,
      num_pipeline_repeats=repeats,
      num_pipeline_microbatches=-1,
      micro_batch_size_to_train_on=stages,
  )
  if repeats == -1:
    sound = layers % (stages * per_stage) == 0
  else:
    sound = layers == stages * per_stage * repeats
  assert (problems.problems(config) == []) == sound


BALANCED = {"routed_bias": True, "routed_bias_update_rate": 0.1}
EXPLICIT_EXPERTS = {"shard_mode": "explicit", "num_experts": 4, "num_decoder_layers": 10}
IN_A_SCAN = {"num_layers_per_pipeline_stage": 2, "num_pipeline_repeats": 1, "scan_layers_per_stage": True}


@pytest.mark.parametrize(
    "values",
    [
        BALANCED,
        BALANCED | IN_A_SCAN | {"param_scan_axis": 0},
        BALANCED | IN_A_SCAN | {"model_name": "deepseek3-671b"},
        {"shard_mode": "explicit", "num_decoder_layers": 10},
        {"shard_mode": "explicit", "rope_type": "yarn"},
        EXPLICIT_EXPERTS | {"num_decoder_layers": 8, "sparse_matmul": False},
        EXPLICIT_EXPERTS,
        {"parameter_memory_host_offload": True},
        {"use_qk_clip": True},
        {"use_qk_clip": True}
        | {"num_layers_per_pipeline_stage": 2, "num_pipeline_repeats": 1}
        | {"scan_layers_per_stage": True},
        {"opt_type": "sgd"},
    ],
    ids=str,
)
def test_what_the_implementations_can_do_is_not_refused(values):
  assert problems.problems(make(**values)) == []


@pytest.mark.parametrize(
    "values, message",
    [
        ({"quantization": "int8"}, "microbatch of 2 rows .16 / .*Set quantization_local_shard_count=2"),
        ({"quantization": "fp8_gpu", "use_qwix_quantization": True}, "Set quantization=fp8 and use_qwix_quantization=F"),
        ({"quantization": "fp8_nanoo", "use_qwix_quantization": True}, "Set quantization=nanoo_fp8 and use_qwix_quant"),
        (
            {"quantization": "fp8_full", "use_qwix_quantization": True, "scan_layers_per_stage": True}
            | {"num_layers_per_pipeline_stage": 2, "num_pipeline_repeats": 1},
            "cannot be scanned over.*Set scan_layers_per_stage=False",
        ),
        ({"opt_type": "muon"}, "layers would be mixed.*Set opt_type=adamw, adam_pax or sgd"),
        (
            {"use_qk_clip": True, "num_layers_per_pipeline_stage": 2, "num_pipeline_repeats": 1},
            "num_layers_per_pipeline_stage=2: set scan_layers_per_stage=True",
        ),
        ({"use_qk_clip": True, "num_decoder_layers": 10}, "8 of 10: set pipeline_parallel_layers=-1"),
        ({"use_qk_clip": True, "scan_layers": False}, "scan_layers=False: set scan_layers=True"),
        ({"enable_streaming_diloco": True}, "in other fragments.*Set enable_streaming_diloco=False"),
        ({"quantization": "te_mxfp8"}, "Transformer Engine.*Set quantization=fp8"),
        ({"quantization": "serve_fp8_weight"}, 'is for serving.*Set quantization=""'),
        (
            BALANCED | {"pipeline_parallel_layers": 8, "num_decoder_layers": 10},
            "2 layers outside the pipeline .*Set pipeline_parallel_layers=-1",
        ),
        (
            BALANCED | {"num_layers_per_pipeline_stage": 2, "num_pipeline_repeats": 1},
            "num_layers_per_pipeline_stage=2.*Set scan_layers_per_stage=True",
        ),
        (BALANCED | IN_A_SCAN, "param_scan_axis=1: biases are stacked along that axis.*Set param_scan_axis=0"),
        (
            {"shard_mode": "explicit", "rope_type": "yarn", "num_decoder_layers": 10},
            "shard_mode=explicit with rope_type=yarn and 2 layers outside.*Set shard_mode=auto",
        ),
        (
            {"shard_mode": "explicit", "mtp_num_layers": 1},
            "behind the pipeline.*Set shard_mode=auto, or mtp_num_layers=0",
        ),
        (
            EXPLICIT_EXPERTS | {"sparse_matmul": False},
            "2 layers of experts outside.*Set shard_mode=auto, or pipeline_par",
        ),
        (EXPLICIT_EXPERTS | {"shared_experts": 1}, "2 layers of experts outside.*Set shard_mode=auto, or pipeline_par"),
        (
            {"shard_mode": "explicit", "num_target_devices": 32},
            "32 devices cannot share the 16 rows of a step.*Set per_device_batch_size so .* multiple of 32, or shard_m",
        ),
        (
            {"shard_mode": "explicit", "eval_interval": 1, "micro_batch_size_to_eval_on": 24}
            | {"num_target_devices": 16, "ici_pipeline_parallelism": 4},
            "16 devices cannot share the 24 rows of an evaluation",
        ),
        (
            {"parameter_memory_host_offload": True, "gradient_accumulation_steps": 2},
            "gradient_accumulation_steps=2.*Set gradient_accumulation_steps=1",
        ),
    ],
)
def test_what_the_implementations_cannot_do_is_refused_with_what_to_set(values, message):
  assert re.search(message, only_problem(make(**values)))
  assert problems.problems(make(**values, pipeline_impl="host")) == []

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of MaxText's config with our keys: where a key may be set, what is refused, what stays as it is."""

import copy
import pickle
import re

import pytest

from maxtext_pp_ext import config as keys

PIPELINED = {"ici_pipeline_parallelism": 2, "num_pipeline_microbatches": 2, "pipeline_impl": "circular_bsw"}


def test_the_keys_have_defaults_that_change_nothing(make_config):
  config = make_config()
  assert (config.pipeline_impl, config.pipeline_grad_accum_dtype, config.pipeline_gather_dtype) == (
      "host",
      "auto",
      "auto",
  )


def test_a_key_from_the_command_line_reaches_the_config(make_config):
  config = make_config(**PIPELINED)
  assert config.pipeline_impl == "circular_bsw" and config.num_pipeline_repeats == 2


def test_a_key_as_keyword_argument_reaches_the_config(installed):
  from maxtext.configs import pyconfig

  config = pyconfig.initialize([""], run_name="x", log_config=False, pipeline_gather_dtype="auto", pipeline_impl="host")
  assert config.pipeline_impl == "host"
  assert "pipeline_impl" in config._pydantic_config.__pydantic_fields_set__


def test_a_key_from_a_yml_file_reaches_the_config(installed, tmp_path):
  from maxtext.configs import pyconfig

  file = tmp_path / "my.yml"
  file.write_text(
      "base_config: base.yml\nrun_name: x\nlog_config: false\nbase_num_decoder_layers: 4\nici_pipeline_parallelism: 2\n"
      "pipeline_impl: circular\n"
  )
  assert pyconfig.initialize(["", str(file)]).pipeline_impl == "circular"


def test_a_key_from_the_environment_reaches_the_config_and_gives_way_to_none(make_config, monkeypatch):
  monkeypatch.setenv("M_PIPELINE_IMPL", "circular")
  assert make_config(**(PIPELINED | {"pipeline_impl": None})).pipeline_impl == "circular"
  with pytest.raises(ValueError, match="overridden by both CLI/kwargs and environment"):
    make_config(**PIPELINED)


def test_the_environment_wins_over_a_yml_file_as_it_does_for_the_hosts_keys(installed, tmp_path, monkeypatch):
  from maxtext.configs import pyconfig

  monkeypatch.setenv("M_PIPELINE_GATHER_DTYPE", "weight")
  file = tmp_path / "my.yml"
  file.write_text(
      "base_config: base.yml\nrun_name: x\nlog_config: false\nbase_num_decoder_layers: 4\nici_pipeline_parallelism: 2\n"
      "pipeline_impl: circular\npipeline_gather_dtype: compute\n"
  )
  assert pyconfig.initialize(["", str(file)]).pipeline_gather_dtype == "weight"


def test_the_process_wide_default_reaches_configs_with_a_pipeline_only(make_config):
  from maxtext_pp_ext.host.replacements import defaults

  with defaults.override_pipeline_impl("circular"):
    assert make_config(ici_pipeline_parallelism=2).pipeline_impl == "circular"
    assert make_config().pipeline_impl == "host"


def slow(wrong, words):
  """A problem that tests/host/rules finds on plain objects, like others that are quick here."""
  return pytest.param(wrong, words, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "wrong, words",
    [
        ({"pipeline_impl": "circular_bws"}, "did you mean 'circular_bsw'"),
        ({"pipeline_impl": "none"}, "pipeline_impl=none names no implementation"),
        ({"base_num_decoder_layers": 5}, "cannot be divided"),
        slow({"num_pipeline_repeats": 3}, "Set num_pipeline_repeats=2"),
        ({"num_pipeline_microbatches": 3}, "not a multiple of 2 stages"),
        slow({"pipeline_delay_activation_forwarding": "True"}, "fewer than 4"),
        slow({"rows": 7}, "a batch of 7 rows"),
        slow({"pipeline_fsdp_ag_once": "True"}, "Set pipeline_fsdp_ag_once=False"),
        ({"pipeline_fsdp_ag_per_repeat": "True"}, "Set pipeline_fsdp_ag_per_repeat=False"),
        ({"decoder_block": "gemma4"}, "bypasses the pipeline"),
        slow({"decoder_block": "gpt_oss", "scan_layers": "False"}, "without attention_type"),
        slow({"mhc_expansion_rate": 2}, "mhc_expansion_rate=2"),
        ({"custom_mesh_and_rule": "pure-fsdp"}, "no axis 'stage'"),
        ({"pipeline_gather_dtype": "fp4"}, "'compute'"),
        slow({"fused_qkv": "True", "rows": 4}, "fused_qkv=True needs equally many rows on each of 4 devices (fsdp=4)"),
        (
            {"fused_qkv": "True", "rows": 8, "eval_interval": 5, "eval_per_device_batch_size": 0.5},
            "an evaluation's microbatch of eval_per_device_batch_size=0.5 has 2",
        ),
        (
            {"decoder_block": "mixtral", "num_experts": 4, "num_experts_per_tok": 2, "base_moe_mlp_dim": 32, "rows": 4}
            | {"sparse_matmul": "True", "ici_expert_parallelism": 2},
            "sparse_matmul=True with 2 devices for 4 experts needs equally many rows on each of 4 devices (fsdp=2",
        ),
        ({"enable_checkpointing": "True", "base_output_directory": "out"}, "base_output_directory=out with enable_check"),
    ],
)
def test_a_bad_configuration_stops_with_our_error_and_not_with_an_assert_of_the_host(make_config, wrong, words):
  with pytest.raises(keys.PipelineConfigError) as error:
    make_config(**(PIPELINED | wrong))
  assert words in str(error.value)
  assert "input_value" not in str(error.value)  # pydantic's dump of the whole configuration


@pytest.mark.parametrize("impl, stages", [("circular_bsw", 2), ("circular", 1)], ids=["pipeline", "window"])
def test_a_number_without_a_meaning_stops_the_trainer_by_name(make_config, impl, stages):
  sound = PIPELINED | {"pipeline_impl": impl, "ici_pipeline_parallelism": stages}
  for key, value in {"per_device_batch_size": -3, "max_target_length": 0, "vocab_size": 10**18, "adam_b1": "nan"}.items():
    with pytest.raises(keys.PipelineConfigError, match=f"1 problem .*\n  - {key}={value} (has to be|can be at most) "):
      make_config(**sound | {key: value})


def test_several_problems_are_reported_at_once_even_if_the_host_stops_at_the_first(make_config):
  with pytest.raises(keys.PipelineConfigError) as error:
    make_config(**(PIPELINED | {"base_num_decoder_layers": 5, "num_pipeline_microbatches": 3, "pipeline_impl": "x"}))
  assert len(error.value.problems) == 3
  assert isinstance(error.value.__cause__, AssertionError)  # the host's own, kept


def test_devices_that_the_stages_do_not_divide_are_part_of_one_proposal_for_all_that_is_wrong(make_config):
  with pytest.raises(keys.PipelineConfigError) as error:
    make_config(**(PIPELINED | {"ici_pipeline_parallelism": 3, "num_pipeline_microbatches": 5, "rows": 32}))
  *others, last = error.value.problems
  assert len(others) == 3 and not any("Set " in problem for problem in others)  # layers, microbatches, batch
  assert "8 devices (num_target_devices=8) cannot be divided as" in last
  assert last.endswith("Set, together: ici_pipeline_parallelism=4, num_pipeline_microbatches=4.")
  make_config(**(PIPELINED | {"ici_pipeline_parallelism": 4, "num_pipeline_microbatches": 4, "rows": 32}))


def test_such_devices_alone_are_said_before_maxtext_makes_the_mesh_and_do_not_keep_tests_from_smaller_ones(
    make_config,
):
  values = {"ici_pipeline_parallelism": 3, "num_pipeline_microbatches": 3, "base_num_decoder_layers": 12, "rows": 24}
  with pytest.warns(keys.PipelineConfigWarning, match="divided as ici_pipeline_parallelism=3 .* Set"):
    config = make_config(**(PIPELINED | values))
  from maxtext.utils import maxtext_utils

  with pytest.raises(AssertionError, match="Unspecified value"):
    maxtext_utils.create_device_mesh(config)


def test_checkpoints_of_the_hosts_own_pipeline_are_its_own_business(make_config):
  values = {"pipeline_impl": "host", "enable_checkpointing": "True", "base_output_directory": "out"}
  assert make_config(**(PIPELINED | values)).checkpoint_dir == "out/tiny/checkpoints/"


def test_the_host_keeps_its_own_errors_for_its_own_pipeline(make_config):
  with pytest.raises(ValueError, match="must be divisible by the number of stages") as error:
    make_config(**(PIPELINED | {"pipeline_impl": "host", "num_pipeline_microbatches": 3}))
  assert not isinstance(error.value, keys.PipelineConfigError)


def test_an_error_of_the_host_that_is_not_about_pipelines_is_passed_on(make_config):
  with pytest.raises(ValueError, match="should be a power of two") as error:
    make_config(**PIPELINED, global_parameter_scale=3)
  assert not isinstance(error.value, keys.PipelineConfigError)


def test_the_config_can_be_copied_dumped_and_pickled(make_config):
  config = make_config(**PIPELINED)
  for again in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
    assert again.get_keys() == config.get_keys() and again.pipeline_impl == "circular_bsw"
  assert config.get_keys()["pipeline_gather_dtype"] == "auto"


def test_the_class_keeps_its_name_and_is_a_subclass_of_the_hosts(installed):
  from maxtext.configs import types

  assert types.MaxTextConfig.__qualname__ == "MaxTextConfig" and types.MaxTextConfig.__module__ == types.__name__
  assert types.MaxTextConfig.__mro__[2].__name__ == "MaxTextConfig"


def test_an_unknown_key_is_still_refused(make_config):
  with pytest.raises(ValueError, match="pipeline_implementation"):
    make_config(pipeline_implementation="circular")


@pytest.mark.parametrize("file", ["post_train/sft.yml", "post_train/dpo.yml", "post_train/distillation.yml"])
def test_the_configs_of_other_trainers_take_the_key_and_are_judged_alike(installed, file):
  from maxtext.configs import pyconfig

  keys_of_a_run = {"run_name": "x", "log_config": False, "base_num_decoder_layers": 4, "ici_pipeline_parallelism": 2}
  keys_of_a_run["override_model_config"] = True
  assert pyconfig.initialize(["", *_yml(file)], **keys_of_a_run, pipeline_impl="circular").pipeline_impl == "circular"
  with pytest.raises(keys.PipelineConfigError, match="Set num_pipeline_repeats=2"):
    pyconfig.initialize(["", *_yml(file)], **keys_of_a_run, pipeline_impl="circular", num_pipeline_repeats=3)


def _yml(file):
  from maxtext.utils import globals as paths

  return [f"{paths.MAXTEXT_CONFIGS_DIR}/{file}"]


def test_the_rl_config_takes_the_key_and_refuses_all_but_the_host(installed):
  from maxtext.configs import types

  fields = {"model_name": "llama2-7b", "tokenizer_path": "x"}
  assert types.RLConfig(**fields).pipeline_impl == "host"
  with pytest.raises(keys.PipelineConfigError, match="never run a pipeline"):
    types.RLConfig(**fields, pipeline_impl="circular_bsw")


def test_trainers_that_compile_for_a_topology_are_judged_by_its_devices(make_config):
  # 16 chips: 32 rows, whatever this machine has.
  topology = {"compile_topology": "v5e-16", "compile_topology_num_slices": 1, "per_device_batch_size": 2}
  config = make_config(**PIPELINED, **topology)
  assert config.micro_batch_size_to_train_on == 32
  with pytest.raises(keys.PipelineConfigError, match="num_target_devices=16"):
    make_config(**(PIPELINED | {"num_pipeline_microbatches": 6}), **topology)


@pytest.mark.parametrize(
    "given, said",
    [
        ({"ici_pipeline_paralelism": 4}, "is no key of MaxText's config; did you mean 'ici_pipeline_parallelism'?"),
        ({"pipeline_imp": "circular"}, "did you mean 'pipeline_impl'?"),
        ({"some words": None}, "lines of the form key: value"),
        ({"qqqq": 1}, "'qqqq' is no key of MaxText's config."),
    ],
)
def test_an_unknown_key_is_told_with_the_one_that_was_meant_and_no_others(given, said, installed):
  from maxtext.configs import pyconfig

  with pytest.raises(ValueError, match=re.escape(said)) as error:
    pyconfig.initialize([""], run_name="x", **given)
  assert len(str(error.value)) < 200


@pytest.mark.parametrize("impl", ["host", "circular_bsw"])
def test_an_unknown_topology_is_told_with_some_of_its_kind(impl, make_config):
  with pytest.raises(keys.PipelineConfigError, match="such as v5p-1024, v5p-896") as error:
    make_config(compile_topology="v5p-999", compile_topology_num_slices=1, pipeline_impl=impl)
  assert "dict_keys" not in str(error.value)


@pytest.mark.parametrize("stages", [1, 2], ids=["window", "pipeline"])
def test_a_relative_path_of_checkpoints_is_refused_before_the_first_step(make_config, stages):
  keys_of_run = {"pipeline_impl": "circular_bsw", "ici_pipeline_parallelism": stages, "enable_checkpointing": True}
  with pytest.raises(ValueError, match="base_output_directory=out with enable_checkpointing=True: .*Set base_output_dir"):
    make_config(**keys_of_run, base_output_directory="out")
  assert make_config(**keys_of_run, base_output_directory="/out").enable_checkpointing

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""`maxtext-pp check` as a command: its findings, output and exit codes."""

import json

import pytest

from maxtext_pp_ext import cli
from tests.host.common import TINY
from tests.host.conftest import installed  # noqa: F401  pylint: disable=unused-import
from tests.host.models.test_layouts import DEEPSEEK4
from tests.marks import slow_but

THREE_STAGES = (
    "pipeline_impl=circular_bsw",
    "ici_pipeline_parallelism=3",
    "ici_fsdp_parallelism=2",
    "num_layers_per_pipeline_stage=2",
    "base_num_decoder_layers=14",
    "pipeline_parallel_layers=12",
    "num_pipeline_microbatches=6",
)


@pytest.fixture
def check(installed, capfd):  # noqa: F811  pylint: disable=redefined-outer-name
  # What MaxText prints when it is first imported reaches pytest's stdout, which is not the process's.
  import maxtext.utils.model_creation_utils  # noqa: F401

  capfd.readouterr()

  def run(*arguments):
    status = cli.main(["check", *TINY, *arguments])
    return status, capfd.readouterr().out

  return run


def test_layers_schedule_and_memory_of_a_run_for_devices_that_are_not_there(check):
  status, out = check(*THREE_STAGES, "per_device_batch_size=3", "--json")
  found = json.loads(out)
  assert status == 0 and found["errors"] == found["warnings"] == [] and found["devices"] == 6
  at = lambda stage, repeat: {"stage": stage, "repeat": repeat}
  places = [at(stage, repeat) for repeat in range(2) for stage in range(3) for _ in range(2)]
  assert found["layers"] == [*places, None, None]
  assert found["schedule"] == {
      "stages": 3,
      "repeats": 2,
      "microbatches": 6,
      "delay": 1,
      "iterations": 14,
      "bubble_fraction": 2 / 14,
  }
  parts = found["memory"]["bytes"]
  layer = 4 * 16 * 2 * 8 + 3 * 16 * 32 + 2 * 16  # weights: attention, MLP, norms
  assert parts["double_buffer"] == 2 * 2 * layer * 4
  assert parts["sums"] == 2 * layer * 4
  rows = 18 // 6 / 2  # a microbatch's, of 6 devices of which each stage has two
  outside = 2 * 18 / 6  # of two layers, whose batch all devices share
  assert parts["kept"] == (14 * 2 * rows + outside) * 16 * 16 * 4  # of 2 layers per stage
  assert found["memory"]["total"] == sum(parts.values())


def test_the_layout_is_shown_stage_by_stage(check):
  _, out = check(*THREE_STAGES, "per_device_batch_size=3")
  assert "6 devices: pipeline of 3 stages × 2 repeats × 2 layers, 2 layers outside" in out
  assert "stage 1: layers 2, 3 | 8, 9" in out and "outside the pipeline, on every stage: layers 12, 13" in out
  assert "14 iterations, of which a stage idles in 2: bubble fraction 0.143" in out
  assert "memory of a device, estimated: " in out and "in the pipeline's backward" in out
  assert "sent by a device in a step, estimated: " in out and "weights\n" in out and out.endswith("no errors\n")


def test_layers_inputs_that_are_offloaded_take_none_of_the_devices_memory(check):
  keys = ("pipeline_impl=circular_bsw", "num_pipeline_microbatches=2", "remat_policy=custom", "--devices", "4")
  kept, offloaded = (
      json.loads(check(*keys, f"decoder_layer_input={where}", "--json")[1]) for where in ("device", "offload")
  )
  assert kept["memory"]["bytes"]["kept"] > 0 == offloaded["memory"]["bytes"]["kept"]
  assert offloaded["memory"]["total"] < kept["memory"]["total"]
  assert kept["offloaded"] == 0 < offloaded["offloaded"]


def test_a_mesh_that_jax_cannot_lay_out_on_the_chips_is_refused_with_the_key_for_it(check):
  mesh = ("ici_pipeline_parallelism=2", "ici_fsdp_parallelism=8", "ici_tensor_parallelism=2", "ici_data_parallelism=1")
  keys = (*mesh, "compile_topology=v5p-64", "pipeline_impl=circular_bsw", "per_device_batch_size=2")
  status, out = check(*keys)
  assert status and "cannot lay a mesh of stage 2, fsdp 8, tensor 2 within a slice out on the 2 × 4 × 4 chips" in out
  assert not check(*keys, "allow_split_physical_axes=True")[0]


def test_a_window_is_described_by_its_layers(check):
  _, out = check("pipeline_impl=circular_bsw", "num_pipeline_microbatches=2", "--devices", "4")
  for text in (
      "in the layers' backward",
      "layers' inputs and what remat_policy keeps",
      "sums of the gradients of a layer",
  ):
    assert text in out
  assert "schedule: 2 microbatches, all of which pass through a layer before the next: 8 iterations\n" in out
  assert "stage" not in out and "in the pipeline" not in out and "bubble" not in out


@pytest.mark.slow
def test_layers_that_maxtext_does_not_scan_over_are_no_part_of_the_window(check):
  found = []
  for first in (1, 2):
    ratios = f"compress_ratios={[0] * first + [128, 4, 128, 4]}"
    keys = (*DEEPSEEK4, f"first_num_hash_layers={first}", f"base_num_decoder_layers={4 + first}", ratios)
    _, out = check("pipeline_impl=circular_bsw", *keys, "--devices", "4", "--json")
    found.append(json.loads(out))
    assert found[-1]["layout"] == f"4 layers stacked along param_scan_axis=1, {first} not stacked, no pipeline"
    assert found[-1]["schedule"]["repeats"] == 2
  one, two = (each["memory"]["bytes"] for each in found)
  assert one["double_buffer"] == two["double_buffer"]
  assert one["parameters"] < two["parameters"]


@pytest.mark.parametrize("microbatches, accumulates, bytes_of_sums", [(1, "auto", 2), (1, "float32", 4), (2, "auto", 4)])
def test_a_gradient_that_is_no_sum_has_the_dtype_of_the_gather(check, microbatches, accumulates, bytes_of_sums):
  keys = (f"num_pipeline_microbatches={microbatches}", f"pipeline_grad_accum_dtype={accumulates}", "dtype=bfloat16")
  layer = 4 * 16 * 2 * 8 + 3 * 16 * 32 + 2 * 16  # weights: attention, MLP, norms
  _, out = check("pipeline_impl=circular_bsw", *keys, "--devices", "4", "--json")
  parts = json.loads(out)["memory"]["bytes"]
  assert parts["double_buffer"] == 2 * 2 * layer
  name = "gradients_of_layer" if microbatches == 1 else "sums"
  assert parts[name] == bytes_of_sums * layer
  outside = (2 * 64 * 16 + 16) * 4
  assert parts["gradients"] == pytest.approx((4 * layer * 2 + outside) / 4, rel=0.1)


def test_all_errors_are_listed_and_end_with_2(check):
  wrong = ("pipeline_gather_dtype=float8", "num_pipeline_microbatches=4", "opt_type=muon", "pipeline_fsdp_ag_once=True")
  status, out = check(*THREE_STAGES[:-1], *wrong, "--json")
  errors = json.loads(out)["errors"]
  assert status == 2 and len(errors) >= 4
  for key in ("pipeline_gather_dtype=", "num_pipeline_microbatches=4", "opt_type=muon", "pipeline_fsdp_ag_once=True"):
    assert any(error.startswith(key) for error in errors), key
  status, out = check(*THREE_STAGES[:-1], *wrong)
  assert status == 2 and out.endswith(f"{len(errors)} errors\n") and out.count("error: ") == len(errors)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("base_emb_dim=none_such",), "base_emb_dim"),
        (("no_such_key=1",), "no_such_key"),
        (("ici_tensor_parallelism=3", "--devices", "8"), "ici_fsdp_parallelism=-1 × ici_tensor_parallelism=3. Set "),
        (("compile_topology=v5p-16", "--devices", "8"), "--devices 8 with compile_topology=v5p-16: give one of them"),
        (("ici_data_parallelism=4096", "ici_fsdp_parallelism=4096"), "_fsdp_parallelism=4096 asks for 16777216 devices"),
    ],
    ids=["value", "key", "devices", "devices twice", "too many devices"],
)
def test_what_maxtext_refuses_is_an_error_too(check, arguments, words):
  status, out = check(*arguments, "--json")
  (error,) = json.loads(out)["errors"]
  assert status == 2 and words in error


# The next test is of MaxText's own.
@pytest.mark.parametrize("impl", slow_but(["circular_bsw"], ["host", "circular_bsw"]))
@pytest.mark.parametrize(
    "arguments, said",
    [
        (("enable_checkpointing=True", "base_output_directory=out"), ["base_output_directory=out with enable_check"]),
        (("load_parameters_path=out/0/items",), ["load_parameters_path=out/0/items: Orbax"]),
        (("base_output_directory=out",), []),  # `TINY` has no checkpoints
        (("enable_checkpointing=True", "base_output_directory=/out"), []),
        (("enable_checkpointing=True", "base_output_directory=gs://bucket/out"), []),
        (
            ("enable_checkpointing=True", "base_output_directory=out", "local_checkpoint_directory=here")
            + ("enable_emergency_checkpoint=True", "local_checkpoint_period=2"),
            ["base_output_directory=out with", "local_checkpoint_directory=here with enable_emergency_checkpoint=True"],
        ),
    ],
    ids=lambda value: " ".join(value),
)
def test_relative_paths_of_checkpoints_are_errors_with_any_pipeline(check, arguments, said, impl):
  status, out = check("--devices", "4", "ici_pipeline_parallelism=2", f"pipeline_impl={impl}", *arguments, "--json")
  errors = json.loads(out)["errors"]
  assert len(errors) == len(said) and status == (2 if said else 0)
  assert all(text in error and "Set " in error for text, error in zip(said, errors, strict=True))


def test_a_path_of_checkpoints_in_a_yml_file_is_looked_at_too(installed, capfd, tmp_path):  # noqa: F811  pylint: disable=redefined-outer-name
  keys = (key.replace("=", ": ") for key in TINY if not key.startswith("enable_checkpointing"))
  (tmp_path / "my.yml").write_text("\n".join(["base_config: base.yml", *keys, "base_output_directory: out"]))
  assert cli.main(["check", str(tmp_path / "my.yml"), "--devices", "1"]) == 2
  assert "error: base_output_directory=out with enable_checkpointing=True" in capfd.readouterr().out


def test_devices_that_are_not_shared_out_are_said_with_what_to_set_and_not_as_maxtext_says_so(check):
  arguments = ("--devices", "8", "ici_pipeline_parallelism=3", "base_num_decoder_layers=12", "per_device_batch_size=3")
  status, out = check(*arguments, "pipeline_impl=circular_bsw", "--json")
  (error,) = json.loads(out)["errors"]
  assert status == 2 and "8 devices (num_target_devices=8) cannot be divided as" in error
  assert error.endswith("Set ici_pipeline_parallelism=4 or ici_pipeline_parallelism=2.")


def test_of_a_model_whose_layers_are_not_read_check_says_so(installed, capfd):  # noqa: F811  pylint: disable=redefined-outer-name
  import maxtext.utils.model_creation_utils  # noqa: F401  it prints when it is first imported

  capfd.readouterr()
  status = cli.main(["check", "model_name=qwen3-0.6b", "use_m3_model=True", "--json"])
  found = json.loads(capfd.readouterr().out)
  assert status == 0 and found["errors"] == [] and "use_m3_model=True" in found["not_estimated"][0]


def test_rows_that_flash_attention_wants_on_tpus_are_a_warning(check):
  arguments = ("--devices", "8", "ici_pipeline_parallelism=2", "per_device_batch_size=0.5", "attention=flash")
  status, out = check(*arguments, "pipeline_impl=circular_bsw", "--json")
  [warning] = json.loads(out)["warnings"]
  assert status == 0 and "attention=flash on TPUs needs equally many rows on each of 4 devices (fsdp=4)" in warning


def test_a_known_defect_of_maxtexts_pipeline_is_a_warning(check):
  status, out = check(
      "ici_pipeline_parallelism=4", "base_num_decoder_layers=8", "pipeline_fsdp_ag_per_repeat=True", "--json"
  )
  found = json.loads(out)
  assert status == 0 and found["errors"] == []
  assert len(found["warnings"]) == 1 and "wrong values" in found["warnings"][0]
  assert "no formulas for pipeline_impl=host" in found["not_estimated"][0] and "memory" not in found


def test_sharding_conflicts_are_warnings_or_errors_as_the_config_says(check):
  rules = 'logical_axis_rules=[["embed", "fsdp"], ["mlp", ["fsdp", "tensor"]]]'
  arguments = ("--devices", "4", rules, "--json")
  status, out = check(*arguments)
  found = json.loads(out)
  assert status == 0 and any("mlp/wi_0/kernel" in warning for warning in found["warnings"])
  status, out = check(*arguments, "sharding_conflicts=error")
  assert status == 2 and json.loads(out)["errors"] == found["warnings"]


def test_the_window_of_the_example_in_the_documentation(installed, capfd):  # noqa: F811  pylint: disable=redefined-outer-name
  shape = ("model_name=llama3-70b", "compile_topology=v5p-256", "per_device_batch_size=2", "max_target_length=4096")
  shape += ("ici_pipeline_parallelism=4", "ici_fsdp_parallelism=32", "num_pipeline_microbatches=8")
  assert cli.main(["check", *shape, "pipeline_impl=circular_bsw", "--json"]) == 0
  parts = json.loads(capfd.readouterr().out)["memory"]["bytes"]
  # W = 1.71 GB in bfloat16; A = 67 MB; T = 163
  assert parts["double_buffer"] / 2 == pytest.approx(1.71e9, rel=2e-3)
  assert parts["sums"] == parts["double_buffer"]
  assert parts["kept"] == 163 * 4096 * 8192 * 2


def test_what_does_not_fit_into_the_devices_of_the_topology_is_a_warning(installed, capfd):  # noqa: F811  pylint: disable=redefined-outer-name
  keys = ("model_name=llama3-8b", "per_device_batch_size=4", "max_target_length=4096", "pipeline_impl=circular")
  said = {}
  for topology in ("v6e-4", "v5p-8"):
    assert cli.main(["check", *keys, f"compile_topology={topology}"]) == 0
    said[topology] = capfd.readouterr().out
  assert "warning: It does not fit into the memory of a device, as estimated: " in said["v6e-4"]
  assert " of 33.5 GB, " in said["v6e-4"]
  assert "not fit" not in said["v5p-8"] and " of 102 GB, " in said["v5p-8"]


def test_flags_that_a_run_would_not_have_are_printed_as_it_needs_them(check, monkeypatch):
  monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_a=1")
  status, out = check("compile_xla_flags=--xla_a=1 --xla_b=2")
  assert status == 0 and '  export LIBTPU_INIT_ARGS="$LIBTPU_INIT_ARGS --xla_b=2"' in out.splitlines()
  assert json.loads(check("compile_xla_flags=--xla_b=2", "--json")[1])["flags_to_export"] == ["--xla_b=2"]
  assert "LIBTPU_INIT_ARGS" not in check("compile_xla_flags=--xla_a=1")[1]


def test_a_missing_file_is_reported(installed, capfd):  # noqa: F811  pylint: disable=redefined-outer-name
  assert cli.main(["check", "/no/such.yml"]) == 2
  assert "/no/such.yml" in capfd.readouterr().err

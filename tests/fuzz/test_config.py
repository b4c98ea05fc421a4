# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Configs of every bad kind, through `maxtext-pp check` and, for the structure of yml files, through all commands."""

import itertools
import os
import random

import pytest

from tests.fuzz.common import ACCEPTED, REFUSED, run
from tests.host.common import TINY
from tests.host.conftest import installed  # noqa: F401  pylint: disable=unused-import
from tests.marks import slow_but

SOUND = {
    **dict(key.split("=", 1) for key in TINY),
    "pipeline_impl": "circular_bsw",
    "ici_pipeline_parallelism": "2",
    "num_pipeline_microbatches": "2",
}
# Each is wrong for each key: of another type, out of range, huge, or no text at all.
VALUES = (
    *("", "none", "true", "x", "-1", "0", "-7", "0.5", "1e30", "1e400", "nan", "inf", "-inf", "0x10"),
    *("9" * 30, "9" * 5000, "[]", "[1,2]", "[[1]]", "{}", "{a: 1}", "{a: {b: [1]}}", "'", '"', "[", "{", "a: b", "- 1"),
    *(
        "é",
        "日本",
        "\u202e",
        "\U0001f600",
        "\udcff",
        "\0",
        "\n",
        "\t",
        "  ",
        "*a",
        "&a",
        "!!int x",
        "!!python/name:os.system",
    ),
    *("${run_name}", "${nope}", "${oc.env:HOME}", "${", "%s", "{0}", "1_0", "1,5", "2024-01-01", "01", "+1", "--1"),
)
OURS = (
    "pipeline_impl",
    "pipeline_grad_accum_dtype",
    "pipeline_gather_dtype",
    "pipeline_remat_iterations",
    "pipeline_remat_tensors",
    "sharding_conflicts",
)
HOSTS = (
    "ici_pipeline_parallelism",
    "dcn_pipeline_parallelism",
    "ici_fsdp_parallelism",
    "num_pipeline_microbatches",
    "num_pipeline_repeats",
    "num_layers_per_pipeline_stage",
    "pipeline_parallel_layers",
    "base_num_decoder_layers",
    "per_device_batch_size",
    "eval_interval",
    "gradient_accumulation_steps",
    "pipeline_delay_activation_forwarding",
    "scan_layers",
    "param_scan_axis",
    "remat_policy",
    "decoder_block",
    "model_name",
    "dtype",
    "quantization",
    "shard_mode",
    "mesh_axes",
    "logical_axis_rules",
    "custom_mesh_and_rule",
    "compile_topology",
    "compile_topology_num_slices",
    "base_emb_dim",
    "base_num_query_heads",
    "base_num_kv_heads",
    "base_mlp_dim",
    "head_dim",
    "vocab_size",
    "max_target_length",
    "num_experts",
    "opt_type",
    "adamw_mask",
    "steps",
)
CASES = list(itertools.product(OURS + HOSTS, VALUES))


@pytest.fixture(name="check")
def _check(installed, capfd, tmp_path, monkeypatch, tried):  # noqa: F811  pylint: disable=redefined-outer-name
  import maxtext.utils.model_creation_utils  # noqa: F401  pylint: disable=unused-import

  monkeypatch.chdir(tmp_path)

  def check(*arguments, command=("check",)):
    outcome, said = run(capfd, tmp_path, [*command, *arguments])
    tried(outcome)
    return outcome, said

  return check


def test_the_sound_config_is_accepted(check):
  assert check(*(f"{key}={value}" for key, value in SOUND.items()))[0] == ACCEPTED


def one_value(check, cases):
  for key, value in cases:
    check(*(f"{k}={v}" for k, v in (SOUND | {key: value}).items()))


@pytest.mark.slow
def test_one_value_of_any_kind_is_refused_or_accepted(check):
  one_value(check, random.Random(0).sample(CASES, 36))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(16))
def test_every_odd_value_of_every_key_is_refused_or_accepted(check, part):
  one_value(check, CASES[part::16])


def several_values(check, seed, count):
  source = random.Random(seed)
  for _ in range(count):
    wrong = {source.choice(OURS + HOSTS): source.choice(VALUES) for _ in range(source.randint(2, 6))}
    check(*(f"{k}={v}" for k, v in (SOUND | wrong).items()))


def test_several_at_once_are_refused_or_accepted(check):
  several_values(check, 1, 12)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 6))
def test_many_combinations_are_refused_or_accepted(check, seed):
  several_values(check, seed, 100)


# Pairs that contradict each other; each is refused, and each of the two is named.
CONTRADICTIONS = (
    {"ici_pipeline_parallelism": "3", "num_pipeline_microbatches": "4"},
    {"pipeline_impl": "circular", "pipeline_fsdp_ag_once": "True"},
    {"pipeline_impl": "circular_bsw", "pipeline_fsdp_ag_per_repeat": "True"},
    {"pipeline_impl": "host", "pipeline_gather_dtype": "compute"},
    {"ici_pipeline_parallelism": "1", "num_layers_per_pipeline_stage": "2"},
    {"base_num_decoder_layers": "5", "ici_pipeline_parallelism": "2"},
    {"num_pipeline_repeats": "3", "base_num_decoder_layers": "4"},
    {"pipeline_parallel_layers": "8", "base_num_decoder_layers": "4"},
    {"num_layers_per_pipeline_stage": "4", "base_num_decoder_layers": "4"},
    {"pipeline_delay_activation_forwarding": "True", "num_pipeline_microbatches": "2"},
    {"pipeline_impl": "circular", "opt_type": "muon"},
    {"quantization": "fp8_gpu", "use_qwix_quantization": "True"},
)


# Of stages and of layers, of keys that belong to MaxText's own pipelines or to ours, and of others.
QUICK_CONTRADICTIONS = (
    "ici_pipeline_parallelism num_pipeline_microbatches",
    "pipeline_impl pipeline_fsdp_ag_per_repeat",
    "pipeline_impl pipeline_gather_dtype",
    "num_pipeline_repeats base_num_decoder_layers",
    "quantization use_qwix_quantization",
)


@pytest.mark.parametrize("wrong", slow_but(QUICK_CONTRADICTIONS, {" ".join(each): each for each in CONTRADICTIONS}))
def test_a_contradiction_is_refused_with_the_key_to_change(check, wrong):
  outcome, said = check(*(f"{k}={v}" for k, v in (SOUND | wrong).items()))
  assert outcome == REFUSED and any(key in said for key in wrong)


ARGUMENTS = {
    "no key": ("=1",),
    "no equals sign": ("steps",),
    "a key that there is not": ("no_such_key=1",),
    "a key with a dot": ("steps.x=1",),
    "a key with brackets": ("steps[0]=1",),
    "a key in unicode": ("ståps=1",),
    "a key of zeros": ("\0=1",),
    "a flag of ours as a key": ("--pipeline_impl=circular",),
    "a yml file behind": ("steps=1", "a.yml"),
    "a yaml file": ("a.yaml",),
    "a file that is not there": ("nowhere/a.yml",),
    "a folder": ("folder.yml",),
    "a name that is too long": ("a" * 5000 + ".yml",),
    "a name with zeros": ("a\0.yml",),
    "no name": (".yml",),
}


QUICK_ARGUMENTS = ("no equals sign", "a key with brackets", "a key of zeros", "a yml file behind", "a folder", "no name")


@pytest.mark.parametrize("arguments", slow_but(QUICK_ARGUMENTS, ARGUMENTS))
def test_arguments_that_are_none_are_refused(check, arguments):
  os.mkdir("folder.yml")
  assert check(*arguments)[0] == REFUSED


FILES = {
    "empty": b"",
    "a word": b"steps",
    "a number": b"3",
    "a list": b"- steps: 1\n- 2\n",
    "two documents": b"steps: 1\n---\nsteps: 2\n",
    "unclosed": b"steps: [1, 2\n",
    "tabs": b"steps:\n\t- 1\n",
    "no text": bytes(range(256)),
    "utf-16": "steps: 1".encode("utf-16"),
    "latin-1": "run_name: é".encode("latin-1"),
    "a byte order mark": b"\xef\xbb\xbfsteps: 1\n",
    "zeros": b"\0" * 100,
    "a key twice": b"steps: 1\nsteps: 2\n",
    "a key that is a number": b"1: 2\n",
    "a key that is null": b"null: 2\n",
    "a key that is a list": b"? [a]\n: 2\n",
    "a key that there is not": b"no_such_key: 1\n",
    "a key within a key": b"steps:\n  more: 1\n",
    "a base that is not there": b"base_config: nowhere.yml\n",
    "a base that is itself": b"base_config: bad.yml\n",
    "a base that is no name": b"base_config: [1]\n",
    "a base that is null": b"base_config:\n",
    "an object of Python": b"steps: !!python/object/apply:os.mkdir [made]\n",
    "a tag that nobody knows": b"steps: !mine 1\n",
    "an alias without an anchor": b"steps: *a\n",
    "an anchor that holds itself": b"steps: &a [*a]\n",
    "a reference to nothing": b"steps: ${nope}\n",
    "a reference to itself": b"steps: ${steps}\n",
    "an environment variable that is not set": b"steps: ${oc.env:NO_SUCH_VARIABLE}\n",
    "a resolver that there is not": b"steps: ${system:ls}\n",
    "a date": b"steps: 2024-01-01\n",
    "a number without end": b"steps: 1e999\n",
    "no number": b"steps: .nan\n",
    "many digits": b"steps: " + b"9" * 5000 + b"\n",
    "deep": b"steps: " + b"[" * 3000 + b"]" * 3000 + b"\n",
    "long": b"run_name: " + b"x" * 10**6 + b"\n",
}
OTHER_COMMANDS = {
    "sharding": ("sharding",),
    "draw": ("draw",),
    "plan": ("plan", "--devices", "4"),
    "compare": ("compare", "--impl", "no_such"),
}


QUICK_FILES = (
    *("a list", "two documents", "no text", "utf-16", "a key twice", "a key that is a list", "a key within a key"),
    *(
        "a base that is itself",
        "an object of Python",
        "an anchor that holds itself",
        "a reference to itself",
        "no number",
    ),
)


@pytest.mark.parametrize("content", slow_but(QUICK_FILES, FILES))
def test_a_yml_file_of_any_kind_is_refused_or_accepted(check, tmp_path, content):
  (tmp_path / "bad.yml").write_bytes(content)
  check("bad.yml", *(f"{k}={v}" for k, v in SOUND.items()))
  assert not (tmp_path / "made").exists()


@pytest.mark.slow
@pytest.mark.parametrize("command", OTHER_COMMANDS.values(), ids=OTHER_COMMANDS.keys())
@pytest.mark.parametrize("content", FILES.values(), ids=FILES.keys())
def test_a_yml_file_of_any_kind_is_refused_or_accepted_by_the_other_commands(check, tmp_path, content, command):
  (tmp_path / "bad.yml").write_bytes(content)
  check("bad.yml", command=command)
  assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("command", slow_but(["plan", "compare"], OTHER_COMMANDS))
def test_values_and_files_that_are_wrong_for_every_command(check, tmp_path, command):
  (tmp_path / "bad.yml").write_bytes(b"steps: [1, 2\n")
  for arguments in (
      ("bad.yml",),
      ("nowhere.yml",),
      ("ici_pipeline_parallelism=none",),
      ("ici_pipeline_parallelism=[1]",),
  ):
    assert check(*arguments, command=command)[0] == REFUSED

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""`maxtext-pp compare`: which steps it compiles and what it prints; one test really compiles a step."""

import importlib.util
import json
import math
import os
import re
import subprocess
import sys

import pytest

from maxtext_pp_ext import cli, registry
from maxtext_pp_ext.compiled import compare, limits
from maxtext_pp_ext.compiled.measured import step_times
from maxtext_pp_ext.host.models import variants
from tests.host.common import ROOT, TINY
from tests.host.conftest import installed  # noqa: F401  pylint: disable=unused-import


def figures(scale: float = 1.0, **changed):
  """Figures in the form of `compare.figures`."""
  transfers = [
      {"carries": "weights", "kind": "all-gather", "loop_depth": 1, "wire_bytes": round(3e9 * scale), "count": 12},
      {"carries": "activations", "kind": "collective-permute", "loop_depth": 2, "wire_bytes": 5000, "count": 7},
  ]
  found = {
      "bytes": {"peak": round(9e9 * scale), "temp": round(7e9 * scale), "arguments": 2 * 10**9},
      "transfers": transfers,
      "overlap": {"asynchronous": 0.5, "compute_meanwhile": 0.25},
      "dot_flops": 1.5e15,
      "compile_s": 12.3,
      "compile_cpu_s": 20.1,
      "loops_without_trip_count": [],
      "host_memory_GiB": 2.0,
  }
  return found | changed


REFUSED = {"failure": "1 problem with the pipeline configuration:\n  - too few layers", "refused": True}
STOPPED = {"failure": "stopped: more than 60 s", "host_memory_GiB": 1.0}


@pytest.fixture
def fake(monkeypatch, installed):  # noqa: F811  pylint: disable=redefined-outer-name
  """Replaces compilations by figures, by implementation; returns the list of requested compilations."""
  asked = []

  def install(**rows):
    def compiled(arguments, *, bounds, cpu_devices, **_):
      asked.append((arguments, bounds, cpu_devices))
      given = dict(argument.split("=", 1) for argument in arguments)
      return rows["none" if given.get("ici_pipeline_parallelism", "1") == "1" else given["pipeline_impl"]]

    monkeypatch.setattr(compare, "figures", compiled)
    return asked

  return install


FOUR_STAGES = ("ici_pipeline_parallelism=4", "ici_fsdp_parallelism=2", "pipeline_impl=circular")


def test_a_table_of_what_was_computed_and_reasons_for_the_rest(fake, capfd):
  asked = fake(none=figures(), host=STOPPED, circular_bsw=figures(0.5), circular=REFUSED)
  names = "none,host,circular_bsw,circular"
  assert cli.main(["compare", *TINY, *FOUR_STAGES, "--impl", names, "--minutes", "1", "--memory-gib", "2"]) == 0
  lines = capfd.readouterr().out.splitlines()
  text = "\n".join(lines)
  assert "8 virtual CPU devices, per device and step" in text
  assert re.search(r"memory: peak +9 GB +4\.5 GB", text) and re.search(r"all-gather +3 GB ×12 +1\.5 GB ×12", text)
  assert "in 2 loops" in text and "carries weights" in text and "25%" in text
  assert "host: not computed: stopped: more than 60 s" in text
  assert "circular: refused: 1 problem with the pipeline configuration:" in text and "- too few layers" in text
  assert all(bounds == limits.Limits(seconds=60, memory_bytes=2 << 30) for _, bounds, _ in asked)
  assert [devices for *_, devices in asked] == [8] * 4


def test_json_has_every_figure_and_the_arguments(fake, capfd):
  fake(none=figures(), circular_bsw=REFUSED)
  assert cli.main(["compare", *TINY, *FOUR_STAGES, "--impl", "none,circular_bsw", "--devices", "16", "--json"]) == 0
  found = json.loads(capfd.readouterr().out)
  assert found["devices"] == "16 virtual CPU devices" and set(found["versions"]) >= {"maxtext", "jax"}
  row = found["implementations"]["none"]
  assert "ici_fsdp_parallelism=8" in row.pop("arguments") and row == figures()
  assert found["implementations"]["circular_bsw"]["failure"] == REFUSED["failure"]


def test_sets_of_flags_join_those_of_the_run_in_every_implementation(fake, capfd):
  asked = fake(none=figures(), circular_bsw=figures())
  own, sets = "compile_xla_flags=--xla_a=1", "DENSE_VMEM_LIMIT_FLAG,DATA_PARALLEL_OVERLAP"
  arguments = ["compare", *TINY, *FOUR_STAGES, "compile_topology=v5p-8", own, "--impl", "none,circular_bsw"]
  assert cli.main([*arguments, "--flags", sets]) == 0
  assert "with DENSE_VMEM_LIMIT_FLAG: --xla_tpu_scoped_vmem_limit_kib=98304" in capfd.readouterr().out
  for given, *_ in asked:
    (value,) = [argument for argument in given if argument.startswith("compile_xla_flags=")]
    assert value.startswith(f"{own} --xla_tpu_scoped_vmem_limit_kib=98304 --xla_tpu_enable_data_parallel")
  assert cli.main([*arguments, "--flags", sets, "--json"]) == 0
  assert list(json.loads(capfd.readouterr().out)["flags"]) == sets.split(",")


def test_it_fails_if_nothing_could_be_computed(fake, capfd, tmp_path):
  fake(circular=REFUSED)
  assert cli.main(["compare", *TINY, *FOUR_STAGES, "--impl", "circular", "--output", str(tmp_path / "a.svg")]) == 1
  assert "refused" in capfd.readouterr().out and not (tmp_path / "a.svg").exists()


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs the extra tools")
@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_bars_have_a_row_for_each_implementation(fake, capfd, tmp_path, suffix):
  fake(none=figures(), circular=REFUSED, circular_bsw=figures(0.5))
  file = tmp_path / f"bars.{suffix}"
  assert cli.main(["compare", *TINY, *FOUR_STAGES, "--impl", "none,circular,circular_bsw", "--output", str(file)]) == 0
  assert file.stat().st_size > 2000
  if suffix == "svg":
    text = file.read_text()
    for label in ("none", "circular_bsw", "refused", "sent, GB", "dots, PFLOP"):
      assert f"<!-- {label} -->" in text


def times(*seconds):
  return {"seconds": list(seconds), "losses": [4.0] * (len(seconds) + 2)}


@pytest.fixture
def fake_times(monkeypatch):
  """Replaces the process that runs steps by times; returns the list of requested runs."""
  asked = {}

  def install(**steps):
    def ran(arguments, *, rounds, bounds, cpu_devices, on_tick):
      on_tick("compiling", 1 << 30)
      asked.update(arguments=arguments, rounds=rounds, bounds=bounds, cpu_devices=cpu_devices)
      return step_times.compared(steps) | {"rounds": rounds, "host_memory_GiB": 1.0} if steps else STOPPED

    monkeypatch.setattr(step_times, "step_times", ran)
    return asked

  return install


def test_steps_that_were_compiled_are_run_and_compared_with_the_first(fake, fake_times, capfd, tmp_path):
  fake(host=figures(), circular=STOPPED, circular_bsw=figures(0.5))
  asked = fake_times(host=times(0.2, 0.4, 0.2), circular_bsw=times(0.1, 0.3, 0.16))
  file = tmp_path / "bars.svg"
  arguments = ["compare", *TINY, *FOUR_STAGES, "--impl", "host,circular,circular_bsw", "--run", "--rounds", "3"]
  assert cli.main([*arguments, "--devices", "16", "--output", str(file)]) == 0
  assert list(asked["arguments"]) == ["host", "circular_bsw"] and asked["rounds"] == 3 and asked["cpu_devices"] == 16
  assert "pipeline_impl=circular_bsw" in asked["arguments"]["circular_bsw"]
  text = capfd.readouterr().out
  assert re.search(r"seconds a step here, 3 rounds +0\.2 +0\.16", text)
  assert re.search(r"ratio to host \(middle half\) +1\.000× \(1\.000–1\.000\) +0\.750× \(0\.625–0\.775\)", text)
  assert "transfers are copies in memory" in text and "circular: not computed: stopped" in text
  if importlib.util.find_spec("matplotlib") is not None:
    assert "<!-- step here, seconds -->" in file.read_text()


def test_json_has_the_times_of_every_round(fake, fake_times, capfd):
  fake(host=figures(), circular_bsw=figures())
  asked = fake_times(host=times(0.2, 0.4), circular_bsw=times(0.1, 0.2))
  assert cli.main(["compare", *TINY, *FOUR_STAGES, "--impl", "host,circular_bsw", "--run", "--json"]) == 0
  found = json.loads(capfd.readouterr().out)
  assert found["run"] == {"base": "host", "rounds": asked["rounds"], "host_memory_GiB": 1.0} and asked["rounds"] > 1
  ran = found["implementations"]["circular_bsw"]["run"]
  assert ran["seconds"] == [0.1, 0.2] and ran["ratio"]["median"] == 0.5


NOT_RUN = {
    "one of two": ({"host": times(0.1), "circular_bsw": {"failure": "the loss of step 1 is nan"}}, "circular_bsw"),
    "each": ({"host": {"failure": "ValueError: no"}, "circular_bsw": {"failure": "the loss of step 1 is nan"}}, "host"),
    "all": ({}, "--run"),
}


@pytest.mark.parametrize("steps, name", NOT_RUN.values(), ids=NOT_RUN.keys())
def test_it_fails_if_a_step_was_not_run_and_shows_what_there_is(fake, fake_times, capfd, steps, name):
  fake(host=figures(), circular_bsw=figures(0.5))
  fake_times(**steps)
  assert cli.main(["compare", *TINY, *FOUR_STAGES, "--impl", "host,circular_bsw", "--run"]) == 1
  text = capfd.readouterr().out
  reason = steps.get(name, STOPPED)["failure"]
  assert f"{name}: not run: {reason}" in text and "memory: peak" in text
  assert ("ratio to host" in text) == ("seconds" in steps.get("host", {}))


def test_limits_are_those_of_the_process_that_runs_too(fake, capfd):
  fake(host=figures())
  assert cli.main(["compare", *TINY, *FOUR_STAGES, "--impl", "host", "--run", "--memory-gib", "0.01"]) == 1
  assert re.search(r"--run: not run: stopped after \d+ s: more than 0.01 GiB of host memory", capfd.readouterr().out)


def test_steps_train_in_turns_on_virtual_devices(fake, capfd):
  fake(none=figures(), circular_bsw=figures())
  keys = ("ici_pipeline_parallelism=2", "base_num_decoder_layers=2", "num_pipeline_microbatches=2", "steps=4")
  keys += ("per_device_batch_size=1", "learning_rate=0.01", "--devices", "4", "--rounds", "2")
  status = cli.main(["compare", *TINY, *keys, "--impl", "none,circular_bsw", "--run", "--json"])
  found = json.loads(capfd.readouterr().out)
  assert status == 0, found
  assert found["run"]["base"] == "none" and found["run"]["rounds"] == 2
  for row in found["implementations"].values():
    ran = row["run"]
    assert len(ran["seconds"]) == 2 and all(seconds > 0 for seconds in ran["seconds"])
    losses = ran["losses"]
    # It starts at guessing among 64 words, where logits of variance 1 make the loss 1/2 more than their logarithm, and
    # learns the one batch: the state goes from step to step.
    assert len(losses) == 4 and losses[0] == pytest.approx(math.log(64) + 0.5, abs=0.5) and losses[-1] < losses[0]


WRONG = {
    "no implementation": (["--impl", ""], "names nothing"),
    "unknown implementation": (["--impl", "zero-bubble"], "There is no implementation 'zero-bubble', only none, host"),
    "picture of no kind": (["--output", "a.gif"], "has to end in .svg or .png"),
    "picture nowhere": (["--output", "/no/such/a.svg"], "there is no folder"),
    "no time": (["--minutes", "0"], "has to be positive"),
    "two kinds of devices": (["compile_topology=v5p-8", "--devices", "4"], "give one of them"),
    "to run on TPUs that are not there": (["compile_topology=v5p-8", "--run"], "--run is for CPU devices"),
    "no rounds": (["--run", "--rounds", "0"], "has to be positive"),
    "rounds of nothing": (["--rounds", "3"], "needs --run"),
    "trace of CPU devices": (["--trace", "a.json.gz"], "need a projection"),
    "unknown flags": (
        ["compile_topology=v5p-8", "--flags", "LAYOUT"],
        "--flags LAYOUT: there is no such set of XLA flags",
    ),
    "flags of the TPU compiler for CPUs": (["--flags", "DENSE_VMEM_LIMIT_FLAG"], "Give compile_topology"),
    "flags against flags": (
        ["compile_topology=v5p-8", "--flags", "DENSE_VMEM_LIMIT_FLAG,MOE_VMEM_LIMIT_FLAG"],
        "is 98304 by --flags DENSE_VMEM_LIMIT_FLAG, and 81920 by --flags MOE_VMEM_LIMIT_FLAG",
    ),
    "trace of no kind": (["--trace", "a.txt"], "has to end in .json.gz"),
    "no file": (["/no/such.yml"], "/no/such.yml"),
}


@pytest.mark.parametrize("arguments, words", WRONG.values(), ids=WRONG.keys())
def test_what_cannot_be_compared_is_said_before_anything_is_compiled(fake, capfd, arguments, words):
  asked = fake()
  assert cli.main(["compare", *arguments]) == 2
  assert words in capfd.readouterr().err and asked == []


def keys(name, *argv, on_cpu=True):
  return dict(argument.split("=", 1) for argument in variants.arguments(name, argv, on_cpu=on_cpu))


def test_without_a_pipeline_the_stages_devices_are_given_to_fsdp(installed):  # noqa: F811  pylint: disable=redefined-outer-name
  found = keys("none", "ici_pipeline_parallelism=4", "ici_fsdp_parallelism=8", "dcn_pipeline_parallelism=2")
  assert (found["ici_pipeline_parallelism"], found["ici_fsdp_parallelism"]) == ("1", "32")
  assert (found["dcn_pipeline_parallelism"], found["dcn_fsdp_parallelism"]) == ("1", "2")
  assert keys("none", "ici_pipeline_parallelism=4")["ici_fsdp_parallelism"] == "-1"  # what is left
  assert keys("none", "pipeline_impl=circular", "pipeline_gather_dtype=weight")["pipeline_gather_dtype"] == "auto"


def test_implementations_differ_in_what_chooses_them_only(installed):  # noqa: F811  pylint: disable=redefined-outer-name
  argv = ("ici_pipeline_parallelism=4", "pipeline_impl=circular", "pipeline_fsdp_ag_once=True")
  found = {name: keys(name, *argv) for name in variants.names() if name != "none"}
  chosen = ("pipeline_impl", "pipeline_fsdp_ag_per_repeat", "pipeline_fsdp_ag_once")
  assert {name: tuple(each[key] for key in chosen) for name, each in found.items()} == {
      "host": ("host", "False", "False"),
      "host-bsw": ("host", "True", "False"),
      "host-ag-once": ("host", "False", "True"),
  } | {name: (name, "False", "False") for name in registry.names() if name != registry.HOST}


def test_the_attention_kernel_is_that_of_the_devices_unless_one_is_asked_for(installed):  # noqa: F811  pylint: disable=redefined-outer-name
  assert keys("host", on_cpu=True)["attention"] == "dot_product"
  assert keys("host", "compile_topology=v5p-8", on_cpu=False)["attention"] == "flash"
  assert keys("host", "attention=dot_product", on_cpu=False)["attention"] == "dot_product"


def test_a_step_is_compiled_for_cpu_devices_and_a_wrong_one_refused(tmp_path):
  arguments = [*TINY, "ici_pipeline_parallelism=2", "base_num_decoder_layers=2", "per_device_batch_size=1"]
  command = [sys.executable, "-m", "maxtext_pp_ext.cli", "compare", *arguments, "num_pipeline_microbatches=2", "--json"]
  command += ["adamw_mask=[decoder/layers/mlp]", "--impl", "circular_bsw,host", "--devices", "4"]
  environment = {**os.environ, "PYTHONPATH": str(ROOT), "MAXTEXT_PP_EXT": "off"}
  done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=500, check=False)
  rows = json.loads(done.stdout)["implementations"]
  assert rows["circular_bsw"]["refused"] and "adamw_mask" in rows["circular_bsw"]["failure"]
  row = rows["host"]
  assert "failure" not in row, row
  assert row["bytes"]["temp"] > 0 and row["bytes"]["arguments"] > 0 and row["bytes"]["peak"] is None
  assert row["dot_flops"] > 0
  wire = sum(each["wire_bytes"] for each in row["transfers"])
  assert wire == pytest.approx(row["wire_total_GB"] * 1e9, abs=1e6) and wire > 0
  # The same collectives by two ways through the program.
  counted = {kind: sum(t["count"] for t in row["transfers"] if t["kind"] == kind) for kind in row["count"]}
  assert counted == row["count"]
  assert {each["carries"] for each in row["transfers"]} >= {"weights", "activations", "gradients"}

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""`maxtext-pp compare`: which steps it compiles and what it prints; one test really compiles a step."""

import importlib.util
import json
import math
import re

import pytest

from maxtext_pp_ext import cli, registry
from maxtext_pp_ext.compiled import child, compare, limits, step_times
from maxtext_pp_ext.host.models import variants
from tests.host.common import TINY
from tests.host.conftest import installed  # noqa: F401  pylint: disable=unused-import
from tests.marks import slow_but


def figures(scale: float = 1.0, **changed):
  """Figures in the form of `compare.figures`."""
  transfers = [
      {"payload": "weights", "kind": "all-gather", "loop_depth": 1, "wire_bytes": round(3e9 * scale), "count": 12},
      {"payload": "activations", "kind": "collective-permute", "loop_depth": 2, "wire_bytes": 5000, "count": 7},
  ]
  found = {
      "bytes": {"peak": round(9e9 * scale), "temp": round(7e9 * scale), "arguments": 2 * 10**9},
      "transfers": transfers,
      "overlap": {"asynchronous": 0.5, "compute_meanwhile": 0.25},
      "dot_flops": 1.5e15,
      "compile_s": 12.3,
      "compile_cpu_s": 20.1,
      "loops_without_trip_count": [],
      "conditionals_unknown": [],
      "host_memory_GiB": 2.0,
  }
  return found | changed


REFUSED = {"failure": "1 problem with the pipeline configuration:\n  - too few layers", "refused": True}
STOPPED = {"failure": "stopped: more than 60 s", "host_memory_GiB": 1.0}


CHECKED = {}


@pytest.fixture(autouse=True)
def checked_once(monkeypatch, installed):  # noqa: F811  pylint: disable=redefined-outer-name
  """`compare` checks each step before it compiles it. Many tests compare the same steps."""
  from maxtext_pp_ext.plan import check  # pylint: disable=import-outside-toplevel

  own = check.check

  def once(arguments, devices, *, files):
    key = (*arguments, devices, files)
    if key not in CHECKED:
      CHECKED[key] = own(arguments, devices, files=files)
    return CHECKED[key]

  monkeypatch.setattr(check, "check", once)


@pytest.fixture
def fake(monkeypatch, installed):  # noqa: F811  pylint: disable=redefined-outer-name
  """Replaces compilations by figures, by implementation; returns the list of requested compilations."""
  asked = []

  def install(**rows):
    def compiled(arguments, *, bounds, devices, **_):
      asked.append((arguments, bounds, devices))
      given = dict(argument.split("=", 1) for argument in arguments)
      return rows["none" if given.get("ici_pipeline_parallelism", "1") == "1" else given["pipeline_impl"]]

    monkeypatch.setattr(compare, "figures", compiled)
    return asked

  return install


FOUR_STAGES = ("ici_pipeline_parallelism=4", "ici_fsdp_parallelism=2", "pipeline_impl=circular")


def test_a_table_of_what_was_computed_and_reasons_for_the_rest(fake, capfd):
  asked = fake(none=figures(), host=STOPPED, circular_bsw=figures(0.5), circular=REFUSED)
  names = "none,host,circular_bsw,circular"
  assert cli.main(["compare", *TINY, *FOUR_STAGES, "--impl", names, "--minutes", "1", "--memory-gib", "2"]) == 1
  lines = capfd.readouterr().out.splitlines()
  text = "\n".join(lines)
  assert "8 virtual CPU devices, per device and step" in text
  assert re.search(r"memory: peak +9 GB +4\.5 GB", text) and re.search(r"all-gather +3 GB ×12 +1\.5 GB ×12", text)
  assert "in 2 loops" in text and "payload: weights" in text and "25%" in text
  assert "host: not computed: stopped: more than 60 s" in text
  assert "circular: refused: 1 problem with the pipeline configuration:" in text and "- too few layers" in text
  assert all(bounds == limits.Limits(seconds=60, memory_bytes=2 << 30) for _, bounds, _ in asked)
  assert [devices for *_, devices in asked] == [8] * 4


def test_json_has_every_figure_and_the_arguments(fake, capfd):
  fake(none=figures(), circular_bsw=REFUSED)
  arguments = [*TINY, *FOUR_STAGES, "ici_fsdp_parallelism=4", "--impl", "none,circular_bsw", "--devices", "16"]
  assert cli.main(["compare", *arguments, "--json"]) == 1
  found = json.loads(capfd.readouterr().out)
  assert found["devices"] == "16 virtual CPU devices" and set(found["versions"]) >= {"maxtext", "jax"}
  row = found["implementations"]["none"]
  assert "ici_fsdp_parallelism=16" in row.pop("arguments") and row == figures()
  assert found["implementations"]["circular_bsw"]["failure"] == REFUSED["failure"]


def test_sets_of_flags_join_those_of_the_run_in_every_implementation(fake, capfd):
  asked = fake(none=figures(), circular_bsw=figures())
  own, sets = "compile_xla_flags=--xla_a=1", "DENSE_VMEM_LIMIT_FLAG,DATA_PARALLEL_OVERLAP"
  arguments = ["compare", *TINY, *FOUR_STAGES, "compile_topology=v5p-16", own, "--impl", "none,circular_bsw"]
  assert cli.main([*arguments, "--flags", sets]) == 0
  assert "with DENSE_VMEM_LIMIT_FLAG: --xla_tpu_scoped_vmem_limit_kib=98304" in capfd.readouterr().out
  for given, *_ in asked:
    (value,) = [argument for argument in given if argument.startswith("compile_xla_flags=")]
    assert value.startswith(f"{own} --xla_tpu_scoped_vmem_limit_kib=98304 --xla_tpu_enable_data_parallel")
  assert cli.main([*arguments, "--flags", sets, "--json"]) == 0
  assert list(json.loads(capfd.readouterr().out)["flags"]) == sets.split(",")


def test_flags_that_the_compiler_lacks_are_left_out_of_sets(fake, capfd):
  asked = fake(none=figures())
  arguments = ["compare", *TINY, "compile_topology=v5p-16", "--impl", "none", "--without", "xla_sc_disjoint_spmem"]
  assert cli.main([*arguments, "--flags", "DENSE_VMEM_LIMIT_FLAG,SPARSECORE_QUEUING", "--json"]) == 0
  found = json.loads(capfd.readouterr().out)["flags"]
  (value,) = [each for each in asked[0][0] if each.startswith("compile_xla_flags=")]
  for text in (value, found["SPARSECORE_QUEUING"]):
    assert "offload_queuing_in_lhs=true" in text and "disjoint_spmem" not in text
  for sets, said in {
      "DENSE_VMEM_LIMIT_FLAG": "--without xla_sc_disjoint_spmem: the sets DENSE_VMEM_LIMIT_FLAG have no such flag",
      "best": "--without xla_sc_disjoint_spmem: needs sets of --flags",
  }.items():
    assert cli.main([*arguments, "--flags", sets]) == 2
    assert said in capfd.readouterr().err


def of_step(seconds):
  """Figures of a step that is projected to take these seconds."""
  return figures(projection=PROJECTION | {"step_s": seconds})


def test_best_flags_are_searched_for_each_implementation(monkeypatch, installed, capfd, tmp_path):  # noqa: F811
  """The fake compiler makes windows faster on SparseCores, others by a VMEM limit, and refuses a set."""
  asked = []

  def compiled(arguments, *, trace_file=None, **_):
    asked.append((arguments, trace_file))
    text = " ".join(arguments)
    if "host_transfer_overlap_limit" in text:
      return {"failure": "refused by the compiler"}
    if "disjoint_spmem" in text:
      return {"failure": "No such compile option: 'xla_sc_disjoint_spmem'"}
    gain = "offload_all_gather=true" if "pipeline_impl=circular_bsw" in text else "vmem_limit_kib=98304"
    return of_step(0.4 if gain in text else 0.5)

  monkeypatch.setattr(compare, "figures", compiled)
  own = "compile_xla_flags=--xla_a=1"
  arguments = ["compare", *TINY, "compile_topology=v5p-16", own, "--impl", "none,window", "--flags", "best"]
  file = tmp_path / "result.json"
  assert cli.main([*arguments, "--result", str(file)]) == 0
  text, rows = capfd.readouterr().out, json.loads(file.read_text())["implementations"]
  assert "none: fastest with DENSE_VMEM_LIMIT_FLAG; default flags 0.5 s" in text
  assert "window: fastest with ENABLE_SPARSECORE_OFFLOADING_FOR_" in text
  assert ", without xla_sc_disjoint_spmem, which the compiler lacks; default flags 0.5 s" in text
  assert "not compiled: HOST_OFFLOAD_FLAGS" in text and "with DENSE_VMEM_LIMIT_FLAG: --xla_tpu_scoped" in text
  assert rows["none"]["flags"] == ["DENSE_VMEM_LIMIT_FLAG"] and rows["none"]["projection"]["step_s"] == 0.4
  assert f"{own} --xla_tpu_scoped_vmem_limit_kib=98304" in rows["none"]["arguments"]
  assert rows["none"]["tried"][0] == {"flags": [], "without": [], "step_s": 0.5}
  refused = {"flags": ["HOST_OFFLOAD_FLAGS"], "without": [], "failure": "refused by the compiler"}
  assert refused in rows["none"]["tried"] and all(own in " ".join(given) for given, _ in asked)
  # The best is compiled once more for its files, and only it.
  asked.clear()
  assert cli.main([*arguments, "--trace", str(tmp_path / "step.json.gz"), "--json"]) == 0
  traced = [given for given, trace in asked if trace]
  assert traced == [rows[name]["arguments"] for name in ("none", "window")]


@pytest.mark.slow
def test_best_flags_of_some_are_told_beside_those_that_are_refused(fake, capfd):
  asked = fake(none=of_step(0.5), host=of_step(0.6), circular_bsw=figures())
  refused = ("adamw_mask=[decoder/layers/mlp]", "compile_topology=v5p-16")
  assert cli.main(["compare", *TINY, *FOUR_STAGES, *refused, "--flags", "best"]) == 0
  text = capfd.readouterr().out
  assert "none: no set of flags makes it faster; default flags 0.5 s" in text and "circular_bsw: refused: " in text
  assert asked and not any("pipeline_impl=circular_bsw" in given for given, *_ in asked)


NO_PIPELINE_OF_OURS = ("adamw_mask=[decoder/layers/mlp]",)  # in a pipeline the layers have other paths


def test_all_that_is_asked_for_is_judged_before_anything_is_compiled(fake, capfd):
  asked = fake()
  arguments = ["compare", *TINY, *FOUR_STAGES, *NO_PIPELINE_OF_OURS, "--impl", "none,host,circular_bsw"]
  assert cli.main(arguments) == 2 and asked == []
  said = capfd.readouterr().err
  assert "circular_bsw is refused:\n  - adamw_mask" in said and said.endswith("give --impl none,host.\n")
  assert cli.main(["compare", *TINY, *FOUR_STAGES, "per_device_batch_size=-3"]) == 2 and asked == []
  assert "per_device_batch_size=-3 has to be more than 0" in capfd.readouterr().err


def test_of_the_default_ones_those_that_are_refused_are_rows_that_say_why(fake, capfd):
  asked = fake(none=figures(), host=figures())
  assert cli.main(["compare", *TINY, *FOUR_STAGES, *NO_PIPELINE_OF_OURS]) == 0
  assert len(asked) == 2 and capfd.readouterr().out.count("refused: adamw_mask") == 3


def test_it_fails_if_nothing_could_be_computed(fake, capfd, tmp_path):
  fake(circular=REFUSED)
  assert cli.main(["compare", *TINY, *FOUR_STAGES, "--impl", "circular", "--output", str(tmp_path / "a.svg")]) == 1
  assert "refused" in capfd.readouterr().out and not (tmp_path / "a.svg").exists()


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs the extra tools")
@pytest.mark.parametrize("suffix", slow_but(["svg"], ["svg", "png"]))
def test_bars_have_a_row_for_each_implementation(fake, capfd, tmp_path, suffix):
  fake(none=figures(), circular=REFUSED, circular_bsw=figures(0.5))
  file = tmp_path / f"bars.{suffix}"
  assert cli.main(["compare", *TINY, *FOUR_STAGES, "--impl", "none,circular,circular_bsw", "--output", str(file)]) == 1
  assert file.stat().st_size > 2000
  if suffix == "svg":
    text = file.read_text()
    for label in ("none", "circular_bsw", "refused", "sent, GB", "dots, PFLOP"):
      assert f"<!-- {label} -->" in text


def times(*seconds, memory=None):
  return {"seconds": list(seconds), "losses": [4.0] * (len(seconds) + 2), "memory": memory, "host_memory_GiB": 1.0}


@pytest.fixture
def fake_times(monkeypatch):
  """Replaces the processes that run steps by times; returns what they were asked for."""
  asked = {}

  def install(**steps):
    def ran(arguments, *, rounds, bounds, devices, on_tick):
      on_tick("none, turn 1 of 3", 1 << 30)
      asked.update(arguments=arguments, rounds=rounds, bounds=bounds, devices=devices)
      return step_times.compared(steps) | {"rounds": rounds, "turns": step_times.turns(list(arguments), rounds)}

    monkeypatch.setattr(step_times, "step_times", ran)
    return asked

  return install


def test_steps_that_were_compiled_are_run_and_compared_with_the_first(fake, fake_times, capfd, tmp_path):
  fake(host=figures(), circular=STOPPED, circular_bsw=figures(0.5))
  asked = fake_times(host=times(0.2, 0.4, 0.2), circular_bsw=times(0.1, 0.3, 0.16))
  file = tmp_path / "bars.svg"
  arguments = ["compare", *TINY, *FOUR_STAGES, "--impl", "host,circular,circular_bsw", "--run", "--rounds", "3"]
  arguments += ["ici_fsdp_parallelism=4"]
  assert cli.main([*arguments, "--devices", "16", "--output", str(file)]) == 0
  assert list(asked["arguments"]) == ["host", "circular_bsw"] and asked["rounds"] == 3 and asked["devices"] == 16
  assert "pipeline_impl=circular_bsw" in asked["arguments"]["circular_bsw"]
  text = capfd.readouterr().out
  assert "measured on 16 virtual CPU devices, 3 rounds" in text and "rounds: host 2, circular_bsw 3, host 1" in text
  assert re.search(r"seconds of a step \(middle half\) +0\.2 \(0\.2–0\.3\) +0\.16 \(0\.13–0\.23\)", text)
  assert re.search(r"memory in use, peak +– +–", text) and "do not report their memory in use" in text
  assert re.search(r"ratio to host \(middle half\) +1\.000× \(1\.000–1\.000\) +0\.750× \(0\.625–0\.775\)", text)
  assert "transfers are copies in memory" in text and "circular: not computed: stopped" in text
  if importlib.util.find_spec("matplotlib") is not None:
    assert "<!-- step here, seconds -->" in file.read_text()


@pytest.mark.slow
def test_json_has_the_times_of_every_round(fake, fake_times, capfd):
  fake(host=figures(), circular_bsw=figures())
  asked = fake_times(host=times(0.2, 0.4), circular_bsw=times(0.1, 0.2))
  assert cli.main(["compare", *TINY, *FOUR_STAGES, "--impl", "host,circular_bsw", "--run", "--json"]) == 0
  found = json.loads(capfd.readouterr().out)
  assert found["run"]["base"] == "host" and found["run"]["rounds"] == asked["rounds"] > 1
  ran = found["implementations"]["circular_bsw"]["run"]
  assert ran["seconds"] == [0.1, 0.2] and ran["ratio"]["median"] == 0.5


NOT_RUN = {
    "one of two": ({"host": times(0.1), "circular_bsw": {"failure": "the loss of step 1 is nan"}}, "circular_bsw"),
    "each": ({"host": {"failure": "ValueError: no"}, "circular_bsw": {"failure": "the loss of step 1 is nan"}}, "host"),
}


@pytest.mark.parametrize("steps, name", slow_but(["one of two"], NOT_RUN, spread=True))
def test_it_fails_if_a_step_was_not_run_and_shows_what_there_is(fake, fake_times, capfd, steps, name):
  fake(host=figures(), circular_bsw=figures(0.5))
  fake_times(**steps)
  assert cli.main(["compare", *TINY, *FOUR_STAGES, "--impl", "host,circular_bsw", "--run"]) == 1
  text = capfd.readouterr().out
  assert f"{name}: not run: {steps[name]['failure']}" in text and "memory: peak" in text
  assert ("ratio to host" in text) == ("seconds" in steps["host"])


def test_limits_are_those_of_the_process_that_runs_too(fake, capfd):
  fake(host=figures())
  assert cli.main(["compare", *TINY, *FOUR_STAGES, "--impl", "host", "--run", "--memory-gib", "0.01"]) == 1
  assert re.search(r"host: not run: stopped after \d+ s: more than 0.01 GiB of host memory", capfd.readouterr().out)


@pytest.mark.slow
def test_steps_train_in_turns_on_virtual_devices(fake, capfd):
  fake(none=figures(), circular_bsw=figures())
  keys = ("ici_pipeline_parallelism=2", "base_num_decoder_layers=2", "num_pipeline_microbatches=2", "steps=4")
  keys += ("per_device_batch_size=1", "learning_rate=0.01", "--devices", "4", "--rounds", "2")
  status = cli.main(["compare", *TINY, *keys, "--impl", "none,circular_bsw", "--run", "--json"])
  found = json.loads(capfd.readouterr().out)
  assert status == 0, found
  assert found["run"]["base"] == "none" and found["run"]["turns"] == [["none", 1], ["circular_bsw", 2], ["none", 1]]
  for row in found["implementations"].values():
    ran = row["run"]
    assert len(ran["seconds"]) == 2 and all(seconds > 0 for seconds in ran["seconds"]) and ran["memory"] is None
    losses = ran["losses"]
    # It starts at guessing among 64 words, where logits of variance 1 make the loss 1/2 more than their logarithm, and
    # learns the one batch: the state goes from step to step.
    assert losses[0] == pytest.approx(math.log(64) + 0.5, abs=0.5) and losses[2] < losses[0]
  losses = found["implementations"]["none"]["run"]["losses"]
  assert losses[:3] == pytest.approx(losses[3:], rel=1e-6)  # another turn begins anew


TPU = {"platform": "tpu", "kinds": {"TPU v5": 8}, "count": 8, "processes": 1, "runtime": "libtpu 1"}
PROJECTION = {
    "step_s": 0.5,
    "parts": {},
    "bubbles_s": 0.1,
    "rematerialisation_s": 0.1,
    "tokens_per_s": 1e3,
    "tflops_per_s": 2.0,
}
PROJECTION |= {"mfu": 0.4, "unknown": []}


@pytest.fixture
def machine(monkeypatch):
  """A machine that has devices: sets what JAX would find."""

  def install(**changed):
    monkeypatch.setenv("JAX_PLATFORMS", "tpu,cpu")
    monkeypatch.setattr(child.Machine, "devices", lambda machine, bounds: TPU | changed)

  return install


def test_on_tpus_measured_steps_stand_beside_projected_ones_and_go_into_one_file(
    fake, fake_times, machine, capfd, tmp_path
):
  compiled = fake(host=figures(projection=PROJECTION), circular_bsw=figures(projection=PROJECTION))
  memory = {"peak": 7 * 10**9, "peak_before_steps": 2 * 10**9}
  initialised = {"peak": 3 * 10**9, "peak_before_steps": 3 * 10**9}
  asked = fake_times(host=times(0.5, 0.7, memory=memory), circular_bsw=times(0.4, 0.4, memory=initialised))
  machine()
  file = tmp_path / "result.json"
  arguments = ["compare", *TINY, *FOUR_STAGES, "--impl", "host,circular_bsw", "--flags", "DENSE_VMEM_LIMIT_FLAG"]
  assert cli.main([*arguments, "--run", "--rounds", "2", "--result", str(file)]) == 0
  here = child.Machine(platforms="tpu,cpu")
  assert asked["devices"] == here and all(each == here for *_, each in compiled)
  for given in asked["arguments"].values():
    assert "compile_xla_flags=--xla_tpu_scoped_vmem_limit_kib=98304" in given
  text = capfd.readouterr().out
  assert "8 × TPU v5, per device and step" in text and "measured on 8 × TPU v5, 2 rounds" in text
  assert re.search(r"projected seconds\* +0\.5 +0\.5", text) and re.search(r"measured / proj\w+ +1\.200× +0\.800×", text)
  assert re.search(r"memory in use, peak +7 GB +3 GB", text) and "Virtual" not in text
  assert "circular_bsw: the peak is that of the state's initialisation" in text and "host: the peak" not in text
  found = json.loads(file.read_text())
  assert found["machine"] == TPU and set(found["versions"]) >= {"maxtext_pp_ext", "jax"}
  assert found["given"] == [*TINY, *FOUR_STAGES] and found["flags"]
  ran = found["implementations"]["host"]["run"]
  assert ran["seconds"] == [0.5, 0.7] and ran["memory"] == memory and ran["of_projection"] == pytest.approx(1.2)


def test_what_was_compiled_and_cannot_be_read_still_runs(fake, fake_times, machine, capfd):
  fake(host=figures(), circular_bsw={"failure": "the compiled program cannot be read. gpu", "unread": True})
  fake_times(host=times(0.5), circular_bsw=times(0.4))
  machine(platform="gpu", kinds={"NVIDIA H100": 8})
  assert cli.main(["compare", *TINY, *FOUR_STAGES, "--impl", "host,circular_bsw", "--run", "--rounds", "1"]) == 0
  text = capfd.readouterr().out
  assert "circular_bsw: not computed: the compiled program cannot be read" in text and "measured / " not in text
  assert re.search(r"ratio to host .* 0\.800×", text)


MACHINES = {
    "none": (
        {"failure": "RuntimeError: the TPU is in use"},
        [],
        1,
        "JAX found no devices: RuntimeError: the TPU is in use",
    ),
    "several processes": ({"processes": 4}, [], 2, "belong to 4 processes"),
    "flags on GPUs": ({"platform": "gpu"}, ["--flags", "DENSE_VMEM_LIMIT_FLAG"], 2, "would compile for GPUs"),
    "trace on GPUs": ({"kinds": {"NVIDIA H100": 8}}, ["--trace", "a.json.gz"], 2, "not 8 × NVIDIA H100"),
}


@pytest.mark.parametrize("changed, options, code, words", MACHINES.values(), ids=MACHINES.keys())
def test_devices_on_which_it_cannot_run_are_named_before_anything_is_compiled(
    fake, machine, capfd, changed, options, code, words
):
  asked = fake()
  machine(**changed)
  assert cli.main(["compare", *TINY, "--run", *options]) == code
  assert words in capfd.readouterr().err and asked == []


def test_a_machine_that_has_cpus_only_gets_virtual_devices(fake, fake_times, machine, capfd):
  fake(host=figures())
  asked = fake_times(host=times(0.5))
  machine(platform="cpu")
  assert cli.main(["compare", *TINY, *FOUR_STAGES, "--impl", "host", "--run"]) == 0
  assert asked["devices"] == 8


WRONG = {
    "no implementation": (["--impl", ""], "names nothing"),
    "unknown implementation": (
        ["--impl", "zero-bubble"],
        "--impl zero-bubble: known are none, window, host",
    ),
    "picture of no kind": (["--output", "a.gif"], "has to end in .svg or .png"),
    "picture nowhere": (["--output", "/no/such/a.svg"], "there is no folder"),
    "no time": (["--minutes", "0"], "has to be positive"),
    "two kinds of devices": (["compile_topology=v5p-8", "--devices", "4"], "give one of them"),
    "to run on TPUs that are not there": (["compile_topology=v5p-8", "--run"], "need not be: give one of them"),
    "result of no kind": (["--result", "a.txt"], "has to end in .json"),
    "no rounds": (["--run", "--rounds", "0"], "has to be positive"),
    "no network": (["compile_topology=v5p-8", "--dcn-gbps", "-1"], "has to be positive"),
    "no other slice": (["compile_topology=v5p-8", "--dcn-gbps", "5"], "Give compile_topology_num_slices="),
    "a network of CPUs": (["steps=1", "--dcn-gbps", "5"], "needs a projection, which is for TPUs"),
    "rounds of nothing": (["--rounds", "3"], "needs --run"),
    "trace of CPU devices": (["--trace", "a.json.gz"], "need a projection"),
    "unknown flags": (
        ["compile_topology=v5p-8", "--flags", "LAYOUT"],
        "--flags LAYOUT: there is no such set of XLA flags",
    ),
    "flags of the TPU compiler for CPUs": (["steps=1", "--flags", "DENSE_VMEM_LIMIT_FLAG"], "Give compile_topology"),
    "flags that are none": (
        ["compile_topology=v5p-8", "compile_xla_flags=foo", "--flags", "best"],
        "'foo' is not a flag",
    ),
    "best flags of CPU devices": (["steps=1", "--flags", "best"], "Give compile_topology"),
    "best of some flags": (["--flags", "best,DENSE_VMEM_LIMIT_FLAG"], "best tries all sets"),
    "flags against flags": (
        ["compile_topology=v5p-8", "--flags", "DENSE_VMEM_LIMIT_FLAG,MOE_VMEM_LIMIT_FLAG"],
        "is 98304 by --flags DENSE_VMEM_LIMIT_FLAG, and 81920 by --flags MOE_VMEM_LIMIT_FLAG",
    ),
    "trace of no kind": (["--trace", "a.txt"], "has to end in .json.gz"),
    "no file": (["/no/such.yml"], "/no/such.yml"),
}


# What others are refused for, too: a number that is not positive, a file's ending, flags or a projection for CPUs.
SLOW = {"no implementation", "no rounds", "no network", "result of no kind", "trace of no kind", "trace of CPU devices"}
SLOW |= {"best flags of CPU devices"}


@pytest.mark.parametrize("arguments, words", slow_but(WRONG.keys() - SLOW, WRONG, spread=True))
def test_what_cannot_be_compared_is_said_before_anything_is_compiled(fake, capfd, arguments, words):
  asked = fake()
  assert cli.main(["compare", *arguments]) == 2
  assert words in capfd.readouterr().err and asked == []


def keys(name, *argv, platform="cpu"):
  return dict(argument.split("=", 1) for argument in variants.arguments(name, argv, platform=platform))


def test_without_a_pipeline_the_stages_devices_are_given_to_fsdp(installed):  # noqa: F811  pylint: disable=redefined-outer-name
  found = keys("none", "ici_pipeline_parallelism=4", "ici_fsdp_parallelism=8", "dcn_pipeline_parallelism=2")
  assert (found["ici_pipeline_parallelism"], found["ici_fsdp_parallelism"]) == ("1", "32")
  assert (found["dcn_pipeline_parallelism"], found["dcn_fsdp_parallelism"]) == ("1", "2")
  assert keys("none", "ici_pipeline_parallelism=4")["ici_fsdp_parallelism"] == "-1"  # what is left
  assert keys("none", "pipeline_impl=circular", "pipeline_gather_dtype=weight")["pipeline_gather_dtype"] == "auto"


def test_implementations_differ_in_what_chooses_them_only(installed):  # noqa: F811  pylint: disable=redefined-outer-name
  argv = ("ici_pipeline_parallelism=4", "pipeline_impl=circular", "pipeline_fsdp_ag_once=True")
  found = {name: keys(name, *argv) for name in variants.names() if name not in ("none", "host-prefetch")}
  chosen = ("pipeline_impl", "pipeline_fsdp_ag_per_repeat", "pipeline_fsdp_ag_once")
  assert {name: tuple(each[key] for key in chosen) for name, each in found.items()} == {
      "window": ("circular_bsw", "False", "False"),
      "host": ("host", "False", "False"),
      "host-bsw": ("host", "True", "False"),
      "host-ag-once": ("host", "False", "True"),
  } | {name: (name, "False", "False") for name in registry.names() if name != registry.HOST}


def test_maxtexts_own_prefetch_is_a_variant_where_it_exists_and_is_off_in_the_others(installed, monkeypatch):  # noqa: F811  pylint: disable=redefined-outer-name
  from maxtext.configs import types

  if "prefetch_fsdp_weights" not in types.MaxTextConfig.model_fields:
    with pytest.raises(ValueError, match="needs a MaxText with the key prefetch_fsdp_weights"):
      keys("host-prefetch")
  monkeypatch.setitem(types.MaxTextConfig.model_fields, "prefetch_fsdp_weights", None)
  found = keys("host-prefetch", "ici_pipeline_parallelism=4", "ici_fsdp_parallelism=2", "pipeline_impl=circular")
  assert (found["prefetch_fsdp_weights"], found["pipeline_impl"], found["ici_fsdp_parallelism"]) == ("True", "host", "8")
  assert keys("circular_bsw", "prefetch_fsdp_weights=True")["prefetch_fsdp_weights"] == "False"
  assert "prefetch_fsdp_weights" not in keys("circular_bsw")


def test_the_window_keeps_the_microbatches_of_a_run_without_a_pipeline(installed):  # noqa: F811  pylint: disable=redefined-outer-name
  assert keys("window", "num_pipeline_microbatches=8")["num_pipeline_microbatches"] == "8"
  assert keys("window", "num_pipeline_microbatches=8", "ici_pipeline_parallelism=2")["num_pipeline_microbatches"] == "-1"


def test_the_attention_kernel_is_that_of_the_devices_unless_one_is_asked_for(installed):  # noqa: F811  pylint: disable=redefined-outer-name
  assert keys("host")["attention"] == "dot_product"
  assert keys("host", "compile_topology=v5p-8", platform="tpu")["attention"] == "flash"
  assert keys("host", "attention=dot_product", platform="tpu")["attention"] == "dot_product"
  assert "attention" not in keys("host", platform=None)  # MaxText's own choice, made where the devices are


def test_a_step_is_compiled_for_cpu_devices(installed, capfd):  # noqa: F811  pylint: disable=redefined-outer-name
  arguments = [*TINY, "ici_pipeline_parallelism=2", "base_num_decoder_layers=2", "per_device_batch_size=1"]
  arguments += ["num_pipeline_microbatches=2", "--impl", "host", "--devices", "4"]
  status = cli.main(["compare", *arguments, "--json"])
  row = json.loads(capfd.readouterr().out)["implementations"]["host"]
  assert status == 0 and "failure" not in row, row
  assert row["bytes"]["temp"] > 0 and row["bytes"]["arguments"] > 0 and row["bytes"]["peak"] is None
  assert row["dot_flops"] > 0
  wire = sum(each["wire_bytes"] for each in row["transfers"])
  assert wire == pytest.approx(row["wire_total_GB"] * 1e9, abs=1e6) and wire > 0
  # The same collectives by two ways through the program.
  counted = {kind: sum(t["count"] for t in row["transfers"] if t["kind"] == kind) for kind in row["count"]}
  assert counted == row["count"]
  assert {each["payload"] for each in row["transfers"]} >= {"weights", "activations", "gradients"}

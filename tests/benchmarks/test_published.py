# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of the published runs and of their report. They compile nothing."""

import re

import pytest
import yaml

from benchmarks import compile_step, published, tables
from maxtext_pp_ext.hardware import chips
from maxtext_pp_ext.host.models import run_config

DENSE, EXPERTS = "llama3.1-8b-v6e-8", "deepseek2-16b-v5p-8"


def row(seconds, peak=10.0):
  parts = {"products": seconds / 2, "other compute": seconds / 4}
  return {"projection": {"step_s": seconds, "parts": parts, "mfu": 0.5}, "peak_GB": peak, "arguments": []}


def cells(text, name):
  (line,) = [line for line in text.splitlines() if line.startswith(f"| {name} ")]
  return [cell.strip() for cell in line.strip("|").split("|")]


@pytest.fixture
def compiled(monkeypatch):
  """The arguments of each compilation, by its label; each step takes 4 s."""
  found = {}

  def compile_instead(given, *, label, **options):
    found[label] = given
    return {key: value for key, value in row(4.0).items() if key != "arguments"}

  monkeypatch.setattr(compile_step, "compile_step", compile_instead)
  return found


def test_every_key_of_a_run_is_one_of_maxtext():
  known = yaml.safe_load((run_config.maxtext_folder() / "configs" / "base.yml").read_text(encoding="utf-8"))
  unknown = {(name, key) for name, run in published.runs().items() for key in run["keys"] if key not in known}
  assert not unknown


@pytest.mark.parametrize("name", published.runs())
def test_a_run_says_where_it_comes_from_and_what_the_compiler_refuses_of_it(name):
  run = published.runs()[name]
  assert re.search(r"github:\S+ .* @ [0-9a-f]{7,9}\b", run["source"]) and run["config"]
  assert chips.of_topology(run["topology"]) and run["step_seconds"] > 0 and run["versions"].startswith("maxtext ")
  flags = [flag.removeprefix("--").partition("=")[0] for flag in run["xla_flags"]]
  refused = [flag.removeprefix("--").partition("=")[0] for flag in run["refused_flags"]]
  assert len(set(flags)) == len(flags) and not set(flags) & set(refused)
  assert all(": " in flag for flag in run["refused_flags"])


def test_the_window_changes_only_the_keys_that_choose_it():
  for run in published.runs().values():
    none, window, in_layer = (set(published.arguments(run, impl)) for impl in ("none", "window", "circular"))
    assert none <= window and window ^ in_layer == {"pipeline_impl=circular_bsw", "pipeline_impl=circular"}
    # A run that leaves FSDP to MaxText's default gets it written out.
    fsdp = {"ici_fsdp_parallelism=-1"} - none if "ici_fsdp_parallelism" not in run["keys"] else set()
    assert fsdp <= window - none


def test_results_without_implementations_are_those_of_none(tmp_path):
  tables.write(tmp_path / "results.json", {DENSE: row(3.0), EXPERTS: {"window": row(2.0)}})
  assert published.read(tmp_path / "results.json") == {DENSE: {"none": row(3.0)}, EXPERTS: {"window": row(2.0)}}


def test_only_what_has_no_result_is_compiled(tmp_path, monkeypatch, compiled):
  runs = {name: published.runs()[name] for name in (DENSE, EXPERTS)}
  monkeypatch.setattr(published, "runs", lambda: runs)
  refused = {"failure": "no window here", "refused": True, "arguments": []}
  tables.write(tmp_path / "found.json", {DENSE: {"none": row(5.0)}, EXPERTS: {"window": refused}})
  published.main(["--output", str(tmp_path / "found")])
  assert list(compiled) == [f"{DENSE}, window", f"{EXPERTS}, none"]
  found = tables.read(tmp_path / "found.json")
  assert found[DENSE]["none"] == row(5.0) and found[EXPERTS]["window"] == refused
  assert found[DENSE]["window"]["arguments"] == published.arguments(runs[DENSE], "window")
  compiled.clear()
  published.main(["--output", str(tmp_path / "found"), "--run", DENSE, "--impl", "none"])
  assert list(compiled) == [f"{DENSE}, none"]


def test_implementations_with_stages_are_refused(capsys):
  with pytest.raises(SystemExit):
    published.main(["--impl", "none", "circular_ag_once"])
  assert (
      "--impl circular_ag_once: these runs have no pipeline. Choose from none, window, circular."
      in capsys.readouterr().err
  )


def test_a_table_has_the_windows_seconds_beside_those_of_the_run_that_was_measured():
  results = {
      DENSE: {"none": row(4.0, peak=20.0), "window": row(3.0, peak=22.0)},
      EXPERTS: {"none": row(5.0), "window": row(5.5)},
  }
  text = published.report(results)
  assert cells(text, DENSE)[1:3] == ["custom", "8"]
  assert cells(text, DENSE)[-4:] == ["4.00", "3.00", "0.750", "22.0"]
  assert "2 runs: a step takes 0.925 times the seconds of none on average, and 1.100 times at most (" + EXPERTS in text


def test_rows_are_compared_with_the_fastest_flags_of_each():
  results = {
      DENSE: {"none": row(4.0), "none, A": row(3.0), "window": row(5.0), "window, A, without b": row(1.5, peak=9.0)}
  }
  text = published.report(results)
  assert cells(text, DENSE)[-4:] == ["3.00", "1.50", "0.500", "9.0"]
  assert f"- {DENSE}: none 4.000 s; none, A 3.000 s; window 5.000 s; window, A, without b 1.500 s" in text


def test_a_window_that_holds_no_weights_is_marked_where_it_is_the_fastest():
  results = {
      DENSE: {"none": row(4.0), "window": row(5.0), "circular, A": row(3.0, peak=7.0)},
      EXPERTS: {"none": row(4.0), "window": row(2.0), "circular": row(3.0)},
  }
  text = published.report(results)
  assert cells(text, DENSE)[-4:] == ["4.00", "3.00 †", "0.750", "7.0"] and cells(text, EXPERTS)[-3:-1] == [
      "2.00",
      "0.500",
  ]


def test_sets_of_flags_come_beside_those_of_the_run(tmp_path, compiled):
  name = "llama2-70b-v5p-512"
  output = ["--output", str(tmp_path / "found"), "--run", name, "--impl", "window", "--flags", "DENSE_VMEM_LIMIT_FLAG"]
  published.main(output)
  (given,) = compiled.values()
  (flags,) = [text for text in given if text.startswith("compile_xla_flags=")]
  assert "--xla_tpu_scoped_vmem_limit_kib=98304" in flags and published.runs()[name]["xla_flags"][0] in flags
  assert list(tables.read(tmp_path / "found.json")[name]) == ["window, DENSE_VMEM_LIMIT_FLAG"]


def test_a_run_whose_window_has_no_seconds_is_in_the_table_and_the_reason_is_below_it():
  results = {
      DENSE: {"none": row(4.0), "window": {"failure": "the window needs one layer", "refused": True}},
      EXPERTS: {"none": row(5.0), "window": {"failure": "more than 24 GiB of host memory"}},
  }
  text = published.report(results)
  assert cells(text, DENSE)[-4:] == [tables.MISSING] * 4 and "With the window, " not in text
  refused, others = text.partition("The window is refused for:")[2].split("Not computed:")
  assert f"- {DENSE}, window: the window needs one layer" in refused
  assert f"- {EXPERTS}, window: more than 24 GiB of host memory" in others


def test_a_run_that_has_only_the_windows_seconds_is_in_no_table():
  text = published.report({DENSE: {"window": row(3.0)}})
  assert DENSE not in text and "on average" not in text

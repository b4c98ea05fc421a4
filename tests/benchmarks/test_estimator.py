# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of the comparison with MaxText's estimator. They compile nothing."""

import json
import os
import sys

import pytest

from benchmarks import compile_step, estimator

FOUND = (
    "Is OOM: True\nIs OOM: False\n  - Found valid combo: pdb=2.0, policy={'context': 'device', 'mlpwo': 'remat'}\nDone.\n"
)
ROWS = {
    "candidates": [
        {"impl": "circular_bsw", "keys": {"pipeline_impl": "circular_bsw", "num_pipeline_microbatches": 1}},
        {"impl": "none", "keys": {"pipeline_impl": "host", "remat_policy": "full"}},
    ]
}


@pytest.fixture
def searches(monkeypatch):
  """What the searches print; the arguments of each are appended."""
  said = {"maxtext.utils.estimator": FOUND, "maxtext_pp_ext.cli": json.dumps(ROWS)}
  asked = []

  def run(command, environment):
    assert command[:2] == [sys.executable, "-m"] and environment.keys() >= os.environ.keys()
    asked.append(command[2:])
    return said[command[2]], 7.0

  monkeypatch.setattr(estimator, "_run", run)
  return said, asked


def test_both_searches_have_the_same_keys_and_none_of_a_policy(searches):
  _, asked = searches
  estimator.estimated("mistral-7b")
  estimator.planned("mistral-7b")
  given = set(estimator.arguments("mistral-7b"))
  assert all(given <= set(arguments) for arguments in asked) and len(asked) == 2
  assert not any("pipeline" in each or "remat" in each for each in given)


def test_the_estimators_policy_is_a_step_and_so_are_the_rows_of_the_plan(searches, tmp_path, monkeypatch):
  taken = {"estimator": 2.0, "plan, none": 1.5, "plan": 1.0}
  compiled = lambda given, *, names, **_: {"projection": {"step_s": taken[names[1]]}, "given": given}
  monkeypatch.setattr(compile_step, "compile_step", compiled)
  estimator.main(["--model", "mistral-7b", "--output", str(tmp_path / "found")])
  found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))["mistral-7b"]
  assert found["searches"]["estimator"]["compilations"] == 2
  given = {name: set(step["arguments"]) for name, step in found["steps"].items()}
  assert {"remat_policy=custom", "context=device", "mlpwo=remat", "decoder_layer_input=device"} <= given["estimator"]
  assert "pipeline_impl=circular_bsw" in given["plan"] and "remat_policy=full" in given["plan, none"]
  text = (tmp_path / "found.md").read_text(encoding="utf-8")
  assert "1.500 (0.75×)" in text and "1.000 (0.50×)" in text and "0.50 times the seconds" in text


def test_an_estimator_that_fails_says_why_and_has_no_step(searches):
  said, _ = searches
  said["maxtext.utils.estimator"] = "no such flag"
  failed = estimator.estimated("llama3-8b")
  assert failed["failure"] == "no such flag"
  assert "estimator" not in estimator.steps("llama3-8b", {"estimator": failed, "plan": estimator.planned("llama3-8b")})


def test_with_plan_only_what_plan_finds_is_compiled_again(searches, tmp_path, monkeypatch):
  compiled = []

  def compile_one(given, *, names, **_):
    compiled.append(names[1])
    return {"projection": {"step_s": float(len(compiled))}}

  monkeypatch.setattr(compile_step, "compile_step", compile_one)
  given = ["--model", "mistral-7b", "--output", str(tmp_path / "found")]
  estimator.main(given)
  estimator.main([*given, "--plan"])
  assert compiled == ["estimator", "plan, none", "plan", "plan"]
  assert [arguments[0] for arguments in searches[1]].count("maxtext.utils.estimator") == 1
  found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))["mistral-7b"]
  assert {name: step["projection"]["step_s"] for name, step in found["steps"].items()} == {
      "estimator": 1.0,
      "plan, none": 2.0,
      "plan": 4.0,
  }

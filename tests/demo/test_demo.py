# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of `python -m examples.demo` as a command, in separate processes."""

import os
import subprocess
import sys

import pytest


def run_demo(output, *arguments):
  # Without the keys that tests/conftest.py sets for MaxText: MaxText refuses a key that is given twice.
  environment = {key: value for key, value in os.environ.items() if not key.startswith("M_")}
  command = [sys.executable, "-m", "examples.demo", "--output", str(output), *arguments]
  return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("arguments", [("--steps", "0"), ("not-a-key",), ("--processes", "3")])
def test_an_argument_that_cannot_be_is_a_usage_error_before_anything_is_written(tmp_path, arguments):
  result = run_demo(tmp_path / "output", *arguments)
  assert result.returncode == 2
  assert arguments[-1] in result.stderr
  assert not (tmp_path / "output").exists()


@pytest.mark.slow
def test_the_pipelined_curve_is_the_sequential_one_and_a_second_run_replaces_the_first(tmp_path):
  for _ in range(2):
    result = run_demo(tmp_path, "--steps", "3")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "They agree within float32." in result.stdout
    assert (tmp_path / "loss.png").exists()


@pytest.mark.slow
def test_four_processes_train_the_sequential_curve_and_their_steps_are_shown_once(tmp_path):
  result = run_demo(tmp_path, "--steps", "3", "--processes", "4")
  assert result.returncode == 0, result.stdout + result.stderr
  assert "They agree within float32." in result.stdout and "num_pipeline_microbatches=8 (4 processes)" in result.stdout
  assert result.stdout.count("  step   2  loss ") == 2  # of the pipelined run and of the sequential one
  assert len(list(tmp_path.glob("pipelined.metrics.*.jsonl"))) == 4


@pytest.mark.slow
def test_it_fails_with_the_pipeline_of_the_host_that_computes_wrong_values(tmp_path):
  result = run_demo(tmp_path, "--steps", "3", "--pipeline-impl", "host", "pipeline_fsdp_ag_per_repeat=true")
  assert result.returncode == 1
  assert "They differ by more than float32 explains" in result.stdout


@pytest.mark.slow
def test_a_run_that_fails_ends_with_its_log(tmp_path):
  result = run_demo(tmp_path, "--steps", "1", "no_such_key=1")
  assert result.returncode == 1
  assert "no_such_key" in result.stderr

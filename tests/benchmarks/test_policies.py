# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of the remat policies' report. They compile nothing."""

from maxtext.configs import types
import pytest

from benchmarks import compile_step, policies, tables


def row(products, other, waiting, peak):
  return {"projection": {"step_s": products + other + waiting, "compute_s": products + other}, "peak_GB": peak}


def test_every_policy_that_maxtext_names_has_a_row():
  assert {policy.value for policy in types.RematPolicy} <= set(policies.POLICIES)


@pytest.mark.parametrize("name", policies.SHAPES)
@pytest.mark.parametrize("policy", policies.POLICIES)
def test_a_window_has_the_same_policy_and_flags(policy, name):
  none, window = (set(policies.arguments(name, policy, impl)) for impl in ("none", "window"))
  assert f"remat_policy={policy}" in none and none - {"pipeline_impl=host"} <= window | {
      "pipeline_grad_accum_dtype=auto",
      "pipeline_gather_dtype=auto",
      "pipeline_remat_iterations=0",
      "pipeline_remat_tensors=",
  }
  assert ("mlpwi_0=device" in none) == (policy == policies.CUSTOM)


def test_only_what_has_no_result_is_compiled_and_what_is_asked_for_is_compiled_again(tmp_path, monkeypatch):
  labels = []
  compiled = lambda given, *, label, **options: labels.append(label) or row(2.0, 1.0, 1.0, 10.0)
  monkeypatch.setattr(compile_step, "compile_step", compiled)
  monkeypatch.setattr(policies, "POLICIES", ("full", "minimal"))
  known = row(1.0, 1.0, 1.0, 8.0) | {"arguments": policies.arguments("llama3-8b", "full", "none")}
  tables.write(tmp_path / "found.json", {"llama3-8b": {"full": {"none": known, "window": known}}})
  options = ["--shape", "llama3-8b", "--output", str(tmp_path / "found")]
  policies.main(options)
  assert labels == ["llama3-8b, full, window", "llama3-8b, minimal, none", "llama3-8b, minimal, window"]
  policies.main(options)
  assert len(labels) == 3
  policies.main([*options, "--policy", "minimal", "--impl", "none"])
  assert labels[3:] == ["llama3-8b, minimal, none"]
  assert tables.read(tmp_path / "found.json")["llama3-8b"]["full"]["none"] == known


def test_ratios_compare_compute_and_not_what_waits():
  results = {
      "llama3-70b": {
          "full": {"none": row(8.0, 2.0, 1.0, 30.0), "window": row(8.0, 2.2, 0.0, 31.0)},
          "minimal": {"none": row(6.0, 2.0, 1.0, 60.0), "window": row(6.0, 2.0, 0.5, 60.0)},
          "custom": {"none": row(6.0, 2.0, 1.0, 50.0), "window": {"failure": "out of memory"}},
      }
  }
  text = policies.report(results)
  full, minimal = (
      [cell.strip() for cell in line.split("|")[1:-1]]
      for line in text.splitlines()[-12:]
      if "30.0" in line or "60.0" in line
  )
  assert full == ["full", "11.000", "10.200 (0.93×)", "10.000", "10.200 (1.020×)", "30.0", "31.0 (1.03×)"]
  assert minimal[4] == "8.000 (1.000×)"
  assert "1.010 times the seconds of none on average, and 1.020 times at most (full)" in text
  assert "- custom, window: out of memory" in text

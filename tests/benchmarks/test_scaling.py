# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of the series of small models. They compile nothing."""

import json

from benchmarks import compile_step, scaling

FIGURES = {"peak_GB": 2.0, "temp_GB": 1.0, "wire_total_GB": 3.0, "weight_gathers": 4, "compile_cpu_s": 5.0}


def test_rows_with_kept_activations_are_beside_the_others_and_compared_with_their_like(tmp_path, monkeypatch):
  taken, given = {"host plain": 4.0, "host plain, kept activations": 2.0}, {}

  def compile_one(arguments, *, names, **_):
    given[names[1]] = arguments
    return FIGURES | {"projection": {"step_s": taken.get(names[1], 1.0)}}

  monkeypatch.setattr(compile_step, "compile_step", compile_one)
  monkeypatch.setattr(scaling, "SERIES", {"repeats": ("repeats", [{"repeats": 2}])})
  command = ["--impl", "host plain", "circular_bsw", "--output", str(tmp_path / "scaling")]
  scaling.main(command)
  scaling.main([*command, "--keep"])
  rows = json.loads((tmp_path / "scaling.json").read_text(encoding="utf-8"))[scaling.label({"repeats": 2})]
  assert list(rows) == ["host plain", "circular_bsw", "host plain, kept activations", "circular_bsw, kept activations"]
  policy = "remat_policy=minimal_with_context"
  assert [policy in given[row] for row in rows] == [False, False, True, True]
  assert policy in rows["circular_bsw, kept activations"]["arguments"]
  text = (tmp_path / "scaling.md").read_text(encoding="utf-8")
  assert "1.000 (0.25×)" in text and "1.000 (0.50×)" in text
  assert (tmp_path / "scaling.svg").read_text(encoding="utf-8").count("stroke-dasharray") > 0

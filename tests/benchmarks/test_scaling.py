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


def test_points_with_the_same_program_without_a_pipeline_are_compiled_once(tmp_path, monkeypatch):
  compiled = []

  def compile_one(arguments, *, names, **_):
    compiled.append(names)
    return FIGURES | {"projection": {"step_s": float(len(compiled))}}

  monkeypatch.setattr(compile_step, "compile_step", compile_one)
  points = [{"stages": 2, "repeats": 8}, {"microbatches": 4, "repeats": 4}, {"repeats": 8}]
  monkeypatch.setattr(scaling, "SERIES", {"repeats": ("repeats", points)})
  scaling.main(["--impl", "none", "circular_bsw", "--output", str(tmp_path / "scaling")])
  row = "none, DISABLE_COLLECTIVE_MATMUL"
  assert [name for name, of in compiled if of == row] == ["layers=16 embed=2048", "layers=32 embed=2048"]
  assert sum(of == "circular_bsw" for _, of in compiled) == 3
  rows = json.loads((tmp_path / "scaling.json").read_text(encoding="utf-8"))
  seconds = [rows[scaling.label(point)][row]["projection"]["step_s"] for point in points]
  assert seconds[0] == seconds[1] != seconds[2]
  assert all("windowed_einsum" in " ".join(rows[scaling.label(point)][row]["arguments"]) for point in points)

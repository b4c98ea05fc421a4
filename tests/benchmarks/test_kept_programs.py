# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Programs that a benchmark has kept are read again instead of compiled."""

import pytest

from benchmarks import compile_step, compiler_figures, shapes, tables
from maxtext_pp_ext.compiled import child
from tests.compiled.test_reading import STEP

COMPILED = {
    "names": {"batch": "data[", "optimizer": "state['optimizer']"},
    "compile_s": 7.0,
    "temp_GB": 2.0,
    "peak_GB": 3.0,
    "arg_GB": 1.0,
    "host_memory_GiB": 1.0,
}
SHAPE, IMPL = "llama3-70b", "none"


@pytest.fixture
def run(tmp_path, monkeypatch):
  """Runs the benchmark with options and returns the row; without a chip, so that nothing is projected."""
  compiled = []

  def compile_instead(arguments, *, hlo_file, **_):
    compiled.append(arguments)
    hlo_file.write_text(STEP, encoding="utf-8")
    return {**COMPILED}

  monkeypatch.setattr(child, "compile_step", compile_instead)
  monkeypatch.setattr(compile_step.chips, "of_topology", lambda topology: None)

  def run(*options):
    given = ["--shape", SHAPE, "--impl", IMPL, "--hlo", str(tmp_path), "--output", str(tmp_path / "found"), *options]
    compiler_figures.main(given)
    return tables.read(tmp_path / "found.json")[SHAPE][IMPL], len(compiled)

  return run


def test_a_kept_program_is_read_again_with_the_same_figures(run, monkeypatch):
  row, count = run()
  assert count == 1 and row["peak_GB"] == 3.0 and row["dot_flops"] > 0
  assert run("--read") == (row, 1)
  # What reads programs has changed.
  monkeypatch.setattr(compile_step.compare.products, "dot_flops", lambda *_: 1.0)
  again, _ = run("--read")
  assert again["dot_flops"] != row["dot_flops"] and again["wire_GB"] == row["wire_GB"]


def test_a_program_of_other_arguments_or_versions_and_none_at_all_are_refused(run, monkeypatch, capsys):
  with pytest.raises(ValueError, match="no program of .*model_name=llama3-70b.* has been kept"):
    run("--read")
  run()
  monkeypatch.setattr(child, "versions", lambda: {"jax": "0.0.1"})
  with pytest.raises(ValueError, match="a program of other versions: .* instead of {'jax': '0.0.1'}"):
    run("--read")
  monkeypatch.undo()
  with pytest.raises(SystemExit):
    compiler_figures.main(["--read"])
  assert "--read needs the folder --hlo" in capsys.readouterr().err


def test_programs_of_other_arguments_are_refused(run, monkeypatch):
  run()
  arguments = shapes.arguments
  monkeypatch.setattr(shapes, "arguments", lambda *args, **kwargs: [*arguments(*args, **kwargs), "steps=3"])
  with pytest.raises(ValueError, match="a program of other arguments: .* instead of .*'steps=3'"):
    run("--read")

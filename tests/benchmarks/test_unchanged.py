# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of the comparison of two versions. They compile nothing."""

import dataclasses
import pathlib
import subprocess
import sys

import pytest

from benchmarks import unchanged

BEFORE = """HloModule jit_train_step, is_scheduled=true

FileNames
1 "engine.py"

%add.1 (x.2: f32[], y.3: f32[]) -> f32[] {
  %x.2 = f32[] parameter(0)
  %y.3 = f32[] parameter(1)
  ROOT %sum.4 = f32[] add(%x.2, %y.3), metadata={op_name="a[\\"b\\"]{c}" stack_frame_id=5}
}

ENTRY %main.5 (p: f32[8]) -> f32[] {
  %p = f32[8]{0} parameter(0)
  %zero.6 = f32[] constant(0)
  ROOT %reduce.7 = f32[] reduce(%p, %zero.6), channel_id=3, dimensions={0}, to_apply=%add.1
}
"""
FIGURES = {"projected seconds": 2.0, "bytes on the wire": 1000.0, "peak bytes": 4000.0}


def compiled(program: str = BEFORE, **changed: float) -> unchanged.Compiled:
  return unchanged.Compiled(program=unchanged.normalised(program), figures=FIGURES | changed)


@pytest.mark.parametrize(
    "before, after",
    [
        *[("sum.4", "total.9"), ("%add.1", "%plus.3"), ("channel_id=3", "channel_id=7")],
        *[("stack_frame_id=5", "stack_frame_id=6"), ("engine.py", "window.py")],
    ],
)
def test_a_program_with_other_names_or_source_lines_is_the_same(before, after):
  assert unchanged.verdict(compiled(), compiled(BEFORE.replace(before, after))) == (
      True,
      "the same program, the same figures",
  )


@pytest.mark.parametrize(
    "before, after",
    [("add(%x.2, %y.3)", "add(%y.3, %x.2)"), ("constant(0)", "constant(1)"), ("f32[8]{0}", "f32[8]{0:T(1024)}")],
)
def test_another_operation_is_another_program_which_passes_with_the_same_figures(before, after):
  same, words = unchanged.verdict(compiled(), compiled(BEFORE.replace(before, after), **{"peak bytes": 4003.0}))
  assert same and words.startswith("another program from line")


def test_other_figures_are_a_change_also_of_the_same_program():
  same, words = unchanged.verdict(compiled(), compiled(**{"projected seconds": 2.003}))
  assert not same and "projected seconds: 2.0 before, 2.003 now" in words
  base = dataclasses.replace(compiled(), figures=FIGURES | {"seconds of kernels": 1.0})
  assert not unchanged.verdict(base, compiled())[0]


def test_each_version_is_imported_from_its_own_folder(tmp_path):
  (tmp_path / "maxtext_pp_ext").mkdir()
  (tmp_path / "maxtext_pp_ext" / "__init__.py").write_text("print('the base')")
  line = [sys.executable, "-c", "import maxtext_pp_ext"]
  root = pathlib.Path(unchanged.ROOT)
  done = subprocess.run(line, env=unchanged.environment(tmp_path, tmp_path), cwd=root, capture_output=True, text=True)
  assert "the base" in done.stdout

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of the start-up file: wheels contain it, and `python -m maxtext_pp_ext.host.activate` writes it."""

import pathlib
import shutil
import subprocess
import sys
import zipfile

import pytest

from maxtext_pp_ext.host import activate

ROOT = pathlib.Path(__file__).resolve().parents[2]

SETUP_CFG = """
[metadata]
name = maxtext-pp-ext
version = attr: maxtext_pp_ext.__version__
[options]
packages = find:
cmdclass =
  build_py = maxtext_pp_ext.host.build.BuildPy
[options.packages.find]
include = maxtext_pp_ext*
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory):
  """A copy of the package with a minimal setup.cfg that has the build command."""
  pytest.importorskip("setuptools", reason="builds a wheel")
  folder = tmp_path_factory.mktemp("project")
  shutil.copytree(ROOT / "maxtext_pp_ext", folder / "maxtext_pp_ext", ignore=shutil.ignore_patterns("__pycache__"))
  (folder / "setup.cfg").write_text(SETUP_CFG)
  return folder


@pytest.mark.parametrize("hook", ["build_wheel", "build_editable"])
def test_a_wheel_carries_the_start_up_file_at_its_top(project, hook, tmp_path):
  code = f"from setuptools import build_meta; print(build_meta.{hook}({str(tmp_path)!r}))"
  subprocess.run([sys.executable, "-c", code], cwd=project, check=True, capture_output=True, timeout=300)
  [wheel] = tmp_path.glob("*.whl")
  with zipfile.ZipFile(wheel) as archive:
    assert archive.read("maxtext_pp_ext.pth").decode() == activate.PTH_LINE
    [record] = [name for name in archive.namelist() if name.endswith(".dist-info/RECORD")]
    assert "maxtext_pp_ext.pth," in archive.read(record).decode()  # so that uninstalling removes it


def test_the_project_itself_names_the_build_command():
  text = (ROOT / "setup.cfg").read_text()
  assert "build_py = maxtext_pp_ext.host.build.BuildPy" in text


def test_activation_writes_a_file_that_starts_the_hook_for_a_checkout_and_removes_it(tmp_path, monkeypatch, capsys):
  monkeypatch.setattr(activate.sysconfig, "get_path", lambda name: str(tmp_path))
  assert activate.main(["--path"]) == 0 and "not there" in capsys.readouterr().out
  assert activate.main([]) == 0
  code = (
      f"import site, sys; site.addsitedir({str(tmp_path)!r}); "
      "print(any(type(f).__name__ == 'PatchPointFinder' for f in sys.meta_path))"
  )
  done = subprocess.run(
      [sys.executable, "-I", "-S", "-c", code],
      check=True,
      capture_output=True,
      text=True,
      timeout=60,
      cwd=tmp_path,
      env={},
  )
  assert done.stdout.strip() == "True" and done.stderr == ""
  assert activate.main(["--remove"]) == 0 and not activate.pth_path().exists()

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The package examples/own-pipeline can be built and installed, and its tests pass; docs/extending.md says so."""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import textwrap
import zipfile

import pytest

from maxtext_pp_ext import registry
from maxtext_pp_ext.schedule import GatherPolicy
from tests.host.common import ROOT

PACKAGE = ROOT / "examples" / "own-pipeline"
PAGE = ROOT / "docs" / "extending.md"


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> pathlib.Path:
  """A folder with what `pip install --no-deps --no-build-isolation --target` would put there."""
  pytest.importorskip("setuptools", reason="builds a wheel")
  folder = tmp_path_factory.mktemp("own")
  shutil.copytree(PACKAGE, folder / "source", ignore=shutil.ignore_patterns("__pycache__"))
  code = f"from setuptools import build_meta; print(build_meta.build_wheel({str(folder)!r}))"
  subprocess.run([sys.executable, "-c", code], cwd=folder / "source", check=True, capture_output=True, timeout=300)
  [wheel] = folder.glob("*.whl")
  with zipfile.ZipFile(wheel) as archive:
    archive.extractall(folder / "site")
  return folder


def run(installed: pathlib.Path, *arguments: str) -> subprocess.CompletedProcess:
  path = os.pathsep.join(map(str, (installed / "site", ROOT)))
  environment = os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
  done = subprocess.run(
      [sys.executable, *arguments],
      cwd=installed / "source",
      env=environment,
      capture_output=True,
      text=True,
      timeout=600,
      check=False,
  )
  assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
  return done


def test_the_contract_on_the_page_is_that_of_the_registry_and_the_package_keeps_it():
  contract = PAGE.read_text(encoding="utf-8").partition("has this contract")[2].partition("\n\nA class should")[0]
  rows = re.findall(r"^\| `(\w+)([^|]*)\|", contract, re.MULTILINE)
  needed, optional = (
      {name for name, rest in rows if ("optional" in rest) == is_optional} for is_optional in (False, True)
  )
  source = (PACKAGE / "gpipe_for_maxtext" / "__init__.py").read_text(encoding="utf-8")
  defined = set(re.findall(r"^  def (\w+)\(", source, re.MULTILINE)) | set(re.findall(r"self\.(layers) =", source))
  assert needed == {"__init__", "layers", *registry._METHODS} == defined and optional == registry._OPTIONAL.keys()


def test_the_shortest_implementation_on_the_page_keeps_the_contract():
  [block] = re.findall(r"^ *```python\n(.*?)^ *```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
  names: dict = {}
  exec(textwrap.dedent(block), names)
  assert registry.contract_problem(names["MyPipeline"]) is None
  assert names["MyPipeline"].gather_policy is GatherPolicy.REPEAT


def test_its_name_is_known_where_it_is_installed(installed):
  code = "from maxtext_pp_ext import registry; print(registry.get('gpipe').summary)"
  assert run(installed, "-c", code).stdout.strip() == "from gpipe-for-maxtext 0.1.0"


@pytest.mark.slow
def test_its_own_tests_pass(installed):
  done = run(installed, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir=.", "tests")
  assert "3 passed" in done.stdout


@pytest.mark.slow
def test_maxtext_trains_with_it(installed):
  keys = ("pipeline_impl=gpipe", "num_layers_per_pipeline_stage=2", "num_pipeline_microbatches=4", "steps=2")
  example = str(ROOT / "examples" / "laptop-pipeline.yml")
  done = run(
      installed, "-m", "maxtext_pp_ext.train", example, *keys, "ici_fsdp_parallelism=2", "base_output_directory=out"
  )
  assert "completed step: 1" in done.stdout + done.stderr

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""`maxtext-pp doctor --source`: the installed MaxText's own source fits, and each change that matters is found."""

import importlib.util
import json
import pathlib
import re
import shutil

import pytest

from maxtext_pp_ext import cli
from maxtext_pp_ext.host import doctor, source_check
from maxtext_pp_ext.host.patch_points import source, table

INSTALLED = pathlib.Path(importlib.util.find_spec("maxtext").submodule_search_locations[0])
DECODERS, TYPES = "layers/nnx_decoders.py", "configs/types.py"


@pytest.fixture(name="checkout")
def _checkout(tmp_path):
  """A copy of MaxText's Python files, laid out as in its repository."""
  copy = tmp_path / "src" / "maxtext"
  shutil.copytree(INSTALLED, copy, ignore=lambda folder, names: [n for n in names if "." in n and not n.endswith(".py")])
  return copy


def edit(checkout, file, pattern, replacement):
  text = (checkout / file).read_text()
  changed, count = re.subn(pattern, replacement, text, flags=re.M)
  assert count, pattern
  (checkout / file).write_text(changed)


def test_the_installed_maxtext_fits_by_its_source(capsys):
  assert cli.main(["doctor", "--source", str(INSTALLED.parent), "--json"]) == 0
  result = json.loads(capsys.readouterr().out)["findings"]
  assert all(each["state"] == "ok" for each in result), result
  patch_points = [each for each in result if each["subject"] == "patch points"]
  parts = sum(map(len, table.PATCH_POINTS.values()))
  assert len(patch_points) == parts and all(each["value"].startswith("fits: ") for each in patch_points)


@pytest.mark.parametrize(
    "file, pattern, replacement, name, state, words",
    [
        (
            "layers/pipeline.py",
            r"^def create_nnx_pipeline\(\s*config",
            "def create_nnx_pipeline(keys",
            "maxtext.layers.pipeline",
            doctor.WRONG,
            "found create_nnx_pipeline(keys, ",
        ),
        pytest.param(
            DECODERS,
            r"\bget_decoder_layers\b",
            "layer_types",
            "maxtext.layers.nnx_decoders",
            doctor.WRONG,
            "found nothing",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            TYPES,
            r"^  num_pipeline_repeats:",
            "  pipeline_rounds:",
            "maxtext.configs.types",
            doctor.WRONG,
            "num_pipeline_rep",
            marks=pytest.mark.slow,
        ),
        (
            TYPES,
            r"^(class \w*Pipeline\w*\(.*)$",
            r"\1\n  pipeline_impl: str = ''",
            "maxtext.configs.types",
            doctor.WRONG,
            "own",
        ),
        (
            TYPES,
            r"^  @model_validator.*\n  def set_derived_and_validate_values",
            "  def set_derived_and_validate_values",
            "maxtext.configs.types",
            doctor.WRONG,
            "pydantic validator",
        ),
        (DECODERS, r"\b_create_scanned_layers\b", "_scan", "maxtext.layers.nnx_decoders", doctor.NOTE, "found nothing"),
        ("utils/max_logging.py", r"^def log\b", "def tell", "maxtext.utils.max_logging.log", doctor.WRONG, "reads it"),
        ("version.py", r"^__version__ = .*", "__version__ = '0.3.0'", "maxtext", doctor.WRONG, "outside that range"),
    ],
)
def test_what_has_changed_is_found(checkout, file, pattern, replacement, name, state, words):
  edit(checkout, file, pattern, replacement)
  changed = [each for each in source_check.findings(checkout.parent.parent) if each.state != doctor.FINE]
  assert [(each.name, each.state) for each in changed] == [(name, state)], changed
  assert words in changed[0].advice


@pytest.mark.parametrize(
    "name, state",
    [
        pytest.param("common/checkpointing.py", doctor.NOTE, marks=pytest.mark.slow),
        ("layers/pipeline.py", doctor.WRONG),
    ],
)
def test_a_module_that_is_gone_is_missing(checkout, name, state):
  (checkout / name).unlink()
  module = "maxtext." + name.removesuffix(".py").replace("/", ".")
  told = [each for each in source_check.findings(checkout) if (each.subject, each.name) == ("patch points", module)]
  assert [each.state for each in told] == [state] and "no such module" in told[0].advice


def test_nothing_of_the_source_is_run(checkout):
  edit(checkout, "utils/model_creation_utils.py", r"\A", "raise SystemExit('run')\n")
  patch_points = [each for each in source_check.findings(checkout) if each.subject == "patch points"]
  assert all(each.state == doctor.FINE for each in patch_points)
  module = source.Source(checkout).module("maxtext.utils.model_creation_utils")
  table.PRETRAINED.check(module)


def test_a_folder_without_maxtext_is_refused_and_so_is_source_that_cannot_be_read(checkout, tmp_path, capsys):
  assert cli.main(["doctor", "--source", str(tmp_path / "none")]) == 2
  assert "no source of MaxText is there" in capsys.readouterr().err
  (checkout / "layers" / "pipeline.py").write_text("def f(:")
  told = [each for each in source_check.findings(checkout) if each.name == "maxtext.layers.pipeline"]
  assert told[0].state == doctor.WRONG and "cannot be read" in told[0].advice

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Each workaround for the TPU compiler has a reproducer, and libtpu still needs those that small programs show."""

import importlib.metadata
import importlib.util
import re
import subprocess
import sys

import pytest

from benchmarks import unchanged
from benchmarks.workarounds import __main__ as command
from benchmarks.workarounds import reproducer, table
from benchmarks.workarounds.ablations import Ablation

PLACES = list(table.places())
# Other rooms name the libtpu that their figures come from.
WORKAROUNDS = [place for place in PLACES if place.file.split("/")[0] in ("engine", "hardware")]
ABLATIONS = {name: each for name, each in table.REPRODUCERS.items() if isinstance(each, Ablation)}


def test_each_place_that_names_a_libtpu_names_a_reproducer_that_exists():
  assert [place for place in WORKAROUNDS if place.reproducer not in table.REPRODUCERS] == []


def test_each_reproducer_is_named_by_a_place():
  assert set(table.REPRODUCERS) == {place.reproducer for place in WORKAROUNDS}


def test_a_version_is_found_where_a_comment_breaks_into_lines(tmp_path):
  (tmp_path / "a.py").write_text("x = 1\n# As (libtpu\n# 0.0.48.1; benchmarks.workarounds\n# small_gather) does.\n")
  (tmp_path / "b.py").write_text('"""As libtpu 1.2 does."""\n')
  assert list(table.places(tmp_path)) == [
      table.Place("a.py", 2, "0.0.48.1", "small_gather"),
      table.Place("b.py", 1, "1.2", None),
  ]


@pytest.mark.parametrize("name", ABLATIONS)
def test_the_line_of_an_ablation_occurs_once_and_the_file_without_it_is_python(name):
  ablation = ABLATIONS[name]
  text = ablation.replaced()
  compile(text, ablation.file, "exec")
  assert text != (table.PACKAGE / ablation.file).read_text(encoding="utf-8")


def test_a_workaround_is_needed_if_the_figure_without_it_is_larger_by_more_than_the_margin():
  assert reproducer.is_needed(103, 100, 0.02) and not reproducer.is_needed(102, 100, 0.02)
  assert reproducer.is_needed(1, 0, 0.02) and not reproducer.is_needed(0, 0, 0.02)


def test_a_name_that_does_not_exist_is_refused_with_all_names(capsys):
  with pytest.raises(SystemExit):
    command.main(["small_gathers"])
  said = capsys.readouterr().err
  assert "no small_gathers" in said and all(name in said for name in table.REPRODUCERS)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the extra tools")
def test_the_installed_libtpu_needs_each_workaround_that_a_small_program_shows():
  # In a process of its own: libtpu is loaded once per process.
  run = subprocess.run(
      [sys.executable, "-m", "benchmarks.workarounds"], cwd=unchanged.ROOT, capture_output=True, text=True, check=False
  )
  assert run.returncode == 0, run.stdout + run.stderr
  verdicts = dict(re.findall(r"^(\w+) .*?: (needed|not needed), ", run.stdout, re.MULTILINE))
  assert set(verdicts) == set(table.REPRODUCERS) - set(ABLATIONS)
  last_seen = {place.reproducer: place.libtpu for place in WORKAROUNDS}
  installed = importlib.metadata.version("libtpu")
  # With another libtpu a workaround may go, and this says which.
  assert [name for name, each in verdicts.items() if each == "not needed" and last_seen[name] == installed] == []

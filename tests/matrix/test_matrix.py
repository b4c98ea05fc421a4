# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The table that `make matrix` writes."""

import pytest

from tests import tables
from tests.matrix import __main__ as matrix

VERSIONS = {"Python": "3.12.3", "jax": "0.10.2"}
PASSED = {"passed": 900, "skipped": 3, "failed": []}
FAILED = {"passed": 899, "skipped": 3, "failed": ["tests/test_a.py::test_b", "tests/test_a.py::test_c[1|2]"]}


@pytest.fixture
def table(monkeypatch, tmp_path):
  document = tmp_path / "versions.md"
  document.write_text("before\n<!-- table begins -->\n<!-- table ends -->\nafter\n", encoding="utf-8")
  monkeypatch.setattr(matrix, "TABLE", document)
  return lambda: tables.between(document).splitlines()


def test_each_environment_has_one_line_below_the_heading_in_the_order_of_their_age(table):
  for name, result in (("newest", FAILED), ("oldest", PASSED), ("newest", PASSED)):
    matrix.write(name, VERSIONS, result)
  heading, below, oldest, newest = table()
  assert heading == "| environment | Python | jax | passed | skipped | failed | date |" and set(below) == {"|", "-"}
  assert oldest.startswith("| oldest | 3.12.3 | 0.10.2 | 900 | 3 | none | 20")
  assert newest.startswith("| newest | 3.12.3 | 0.10.2 | 900 | 3 | none | 20")


def test_tests_that_failed_are_named_and_stay_in_their_column(table):
  matrix.write("oldest", VERSIONS, FAILED)
  cell = table()[-1].replace("\\|", "").split("|")[6]
  assert cell == " `tests/test_a.py::test_b`<br>`tests/test_a.py::test_c[12]` "


@pytest.mark.parametrize("broken, rows", [(0, 1), (1, 0)])
def test_a_run_that_was_ended_early_has_no_line(table, monkeypatch, broken, rows):
  monkeypatch.setattr(matrix.environments, "build", lambda root, name: name)
  monkeypatch.setattr(matrix.environments, "versions", lambda python: VERSIONS)
  monkeypatch.setattr(matrix, "_run", lambda python, arguments: {**PASSED, "broken": broken})
  assert matrix.main(["newest"]) == broken
  assert len([line for line in table() if line.startswith("| newest")]) == rows

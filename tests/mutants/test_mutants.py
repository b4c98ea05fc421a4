# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The table of faults fits the sources and the tests, and the runner reports which were noticed."""

import pathlib
import re

import pytest

from tests.mutants import runner, table
from tests.mutants.table import Mutant

CHECKOUT = pathlib.Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("mutant", table.MUTANTS.values(), ids=table.MUTANTS.keys())
def test_a_fault_can_be_put_in_and_its_test_is_there(mutant):
  source = (CHECKOUT / "maxtext_pp_ext" / mutant.file).read_text(encoding="utf-8")
  assert source.count(mutant.old) == 1 and mutant.old != mutant.new
  file, _, test = mutant.test.partition("::")
  tests = (CHECKOUT / file).read_text(encoding="utf-8")
  assert not test or re.search(rf"^def {re.escape(test.partition('[')[0])}\(", tests, re.MULTILINE)


def test_names_are_distinct_and_the_table_of_the_documentation_has_a_row_for_each():
  assert len(table.MUTANTS) == sum(map(len, table.WAYS.values()))
  rows = table.markdown().splitlines()[2:]
  assert [re.search(r"\(`([\w-]+)`\) \|", row)[1] for row in rows] == list(table.MUTANTS)
  assert sum(row.startswith("| **") for row in rows) == len(table.WAYS)


SOUND = {
    "maxtext_pp_ext/__init__.py": "",
    "maxtext_pp_ext/sums.py": "def total(values):\n  return sum(values) + 0\n",
    # Where the package is installed, pytest loads its plugin.
    "maxtext_pp_ext/testing/__init__.py": "",
    "maxtext_pp_ext/testing/plugin.py": "",
    "tests/test_sums.py": """
from maxtext_pp_ext import sums
def test_right():
  assert sums.total([1, 2]) == 3
def test_blind():
  assert sums.total([1, 2])
def test_broken():
  assert not sums.total([1, 2])
""",
}


def mutant(name, test="right", **changes):
  values = {"file": "sums.py", "old": "+ 0", "new": "+ 1"} | changes
  return Mutant(name, "a sum is wrong", test=f"tests/test_sums.py::test_{test}", **values)


VERDICTS = {
    "noticed": (mutant("noticed"), runner.CAUGHT),
    "not noticed": (mutant("not noticed", "blind"), runner.SURVIVED),
    "not there": (mutant("not there", old="- 0"), runner.STALE),
    "there twice": (mutant("there twice", old="s"), runner.STALE),
    "no such file": (mutant("no such file", file="none.py"), runner.STALE),
    "a test that fails anyway": (mutant("anyway", "broken"), "its test does not pass without it"),
    "no such test": (mutant("no such test", "none"), "its test does not pass without it"),
    "a package that cannot be imported": (mutant("syntax", new="+ ("), "no result (exit status 4)"),
    "a test that does not end": (mutant("endless", new="+ sum(iter(int, 1))"), "no result (exit status -9)"),
}


@pytest.mark.slow
def test_what_is_noticed_is_told_from_all_else_and_the_checkout_stays_as_it_is(tmp_path):
  for name, text in SOUND.items():
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text(text)
  lines = []
  found = runner.Runner(checkout=tmp_path, seconds=20.0, say=lines.append).run([each for each, _ in VERDICTS.values()])
  assert [outcome.verdict for outcome in found] == [verdict for _, verdict in VERDICTS.values()]
  assert "assert 4 == 3" in found[0].said and any("caught: noticed" in line for line in lines)
  assert {str(path.relative_to(tmp_path)): path.read_text() for path in tmp_path.rglob("*.py")} == SOUND


def test_a_run_against_another_package_than_the_copy_is_refused(tmp_path):
  (tmp_path / "tests").mkdir()
  with pytest.raises(RuntimeError, match="not against the copy"):
    runner.Runner(checkout=tmp_path).run([])

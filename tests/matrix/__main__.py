# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs the tests with the oldest and the newest versions that setup.cfg allows, and writes docs/releasing.md.

  python -m tests.matrix [oldest] [newest] [--slim | --in-turn] [-- pytest's arguments]

`make matrix` calls it. Each environment is a folder .venv-NAME with the versions of .ci/constraints-NAME.txt, which
`make constraints` writes. --slim runs a minute's worth of tests that train, and writes nothing. --in-turn does so in one
environment, which the number of commits chooses: for a run each night. The exit code is 1 if a test fails.
"""

from __future__ import annotations

import argparse
import datetime
import os
import pathlib
import subprocess
import sys
import tempfile
from xml.etree import ElementTree

from tests import tables
from tests.matrix import environments

ROOT = pathlib.Path(__file__).resolve().parents[2]
TABLE = ROOT / "docs" / "releasing.md"
WHOLE = ("-m", "not slow")
# Arithmetic, an engine, host patch points, a training run through the hook: what a new version breaks first.
SLIM = (
    "-m",
    "not slow",
    "tests/schedule",
    "tests/host/patch_points/test_version.py",
    "tests/host/test_train.py",
    "tests/test_jax_private.py",
    "tests/parity/test_layers.py",
    "-k",
    "not test_layers or 3-3-1",
)


def main(arguments: list[str]) -> int:
  parser = argparse.ArgumentParser(prog="python -m tests.matrix", description=__doc__.partition("\n")[0])
  parser.add_argument("names", nargs="*", metavar="oldest|newest", help="environments; both by default")
  parser.add_argument("--slim", action="store_true", help="a minute's worth of tests; docs/releasing.md stays")
  parser.add_argument("--in-turn", action="store_true", help="--slim, in one environment")
  given, more = parser.parse_known_args(arguments)
  if wrong := set(given.names) - set(environments.NAMES):
    parser.error(f"{', '.join(sorted(wrong))}: known are {', '.join(environments.NAMES)}")
  names = given.names or environments.NAMES
  if given.in_turn:
    names = [names[_commits() % len(names)]]
  slim = given.slim or given.in_turn
  failures = 0
  for name in names:
    python = environments.build(ROOT, name)
    result = _run(python, [*(SLIM if slim else WHOLE), *(argument for argument in more if argument != "--")])
    failures += len(result["failed"]) + result["broken"]
    print(f"{name}: {result['passed']} passed, {result['skipped']} skipped, {len(result['failed'])} failed", flush=True)
    for each in result["failed"]:
      print(f"  {each}", flush=True)
    if result["broken"]:
      print(f"{name}: pytest did not run to its end; docs/releasing.md stays", flush=True)
    # A run that was ended early, or ran nothing, is no result.
    if not slim and not more and not result["broken"]:
      write(name, environments.versions(python), result)
  return 1 if failures else 0


def _commits() -> int:
  done = subprocess.run(["git", "rev-list", "--count", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
  return int(done.stdout) if done.returncode == 0 else 1


def _run(python: pathlib.Path, arguments: list[str]) -> dict:
  """Runs pytest; returns numbers of tests that passed and were skipped, names of those that failed, whether it broke."""
  with tempfile.TemporaryDirectory() as folder:
    report = pathlib.Path(folder) / "report.xml"
    command = [python, "-m", "pytest", "-q", "-n", "logical", "--maxprocesses", "4", "--dist", "loadfile"]
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run([*command, f"--junitxml={report}", *arguments], cwd=ROOT, env=environment, check=False)
    cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
  of = lambda *tags: [case for case in cases if any(case.find(tag) is not None for tag in tags)]
  failed = [f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}" for case in of("failure", "error")]
  skipped = len(of("skipped"))
  passed = len(cases) - skipped - len(failed)
  return {
      "passed": passed,
      "skipped": skipped,
      "failed": failed,
      "broken": int(done.returncode not in (0, 1) or not passed),
  }


def write(name: str, versions: dict[str, str], result: dict) -> None:
  """Replaces the line of an environment in the table."""
  header = ("environment", *versions, "passed", "skipped", "failed", "date")
  failed = "<br>".join(f"`{each}`" for each in result["failed"]).replace("|", "\\|") or "none"
  today = datetime.date.today().isoformat()
  row = (name, *versions.values(), str(result["passed"]), str(result["skipped"]), failed, today)
  # Those of the table whose first cell is the name of an environment: the heading's and the line below it are not.
  rows = {line.split("|")[1].strip(): line for line in tables.between(TABLE).splitlines() if line.count("|") > 1}
  rows[name] = f"| {' | '.join(row)} |"
  lines = [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
  tables.put_between(TABLE, [*lines, *(rows[each] for each in environments.NAMES if each in rows)])


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))

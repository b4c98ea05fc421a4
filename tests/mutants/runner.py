# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Applies faults to copies of the package, one at a time, and runs the tests that have to notice them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
import contextlib
import dataclasses
import os
import pathlib
import shutil
import subprocess
import sys
import time

from maxtext_pp_ext.processes import children, interruption
from tests.mutants.table import Mutant

CAUGHT, SURVIVED, STALE = "caught", "SURVIVED", "STALE"
# Of the checkout, what tests read; the rest is not copied.
COPIED = ("maxtext_pp_ext", "tests", "docs", "benchmarks", "patches", "README.md", "setup.cfg", "pyproject.toml")
PACKAGE = "maxtext_pp_ext"
# pytest's exit statuses.
_PASSED, _FAILED = 0, 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
  """The result of a mutant: `verdict` is CAUGHT, SURVIVED, STALE, or another reason why it was not caught."""

  mutant: Mutant
  verdict: str
  seconds: float
  said: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Runner:
  """Runs tests against copies of a checkout, which itself is never changed.

  Attributes:
    checkout: the folder with the package and its tests.
    seconds: time limit of a run of tests.
    say: called with messages of progress.
  """

  checkout: pathlib.Path
  seconds: float = 600.0
  say: Callable[[str], None] = print

  def run(self, mutants: Sequence[Mutant]) -> list[Outcome]:
    """Runs these mutants; returns their outcomes.

    First the tests run without any fault: a test that fails then catches nothing.

    Raises:
      RuntimeError: tests would run against another package than the copy.
    """
    start, outcomes = time.monotonic(), []
    tests = list(dict.fromkeys(mutant.test for mutant in mutants))
    with _copy_of(self.checkout) as sound:  # what is edited meanwhile is not in it
      self._check_that_the_copy_is_what_runs(sound)
      self.say(f"{len(tests)} tests without a fault …")
      broken = self._broken(sound, tests)
      self.say(f"{len(tests) - len(broken)} of {len(tests)} pass ({time.monotonic() - start:.0f} s)")
      for number, mutant in enumerate(mutants, start=1):
        outcome = self._outcome(sound, mutant, broken)
        outcomes.append(outcome)
        elapsed = time.monotonic() - start
        self.say(f"[{number}/{len(mutants)}, {elapsed:.0f} s] {outcome.verdict}: {mutant.name} ({outcome.seconds:.0f} s)")
        if outcome.said:
          self.say(f"    {outcome.said}")
    return outcomes

  def _broken(self, folder: pathlib.Path, tests: Sequence[str]) -> dict[str, str]:
    """The tests that fail without a fault, with their messages. One by one only if they do not all pass together."""
    if self._pytest(folder, tests)[0] == _PASSED:
      return {}
    found = {test: self._pytest(folder, [test]) for test in tests}
    return {test: said for test, (status, said) in found.items() if status != _PASSED}

  def _outcome(self, sound: pathlib.Path, mutant: Mutant, broken: dict[str, str]) -> Outcome:
    start = time.monotonic()
    if mutant.test in broken:
      return Outcome(mutant=mutant, verdict="its test does not pass without it", seconds=0.0, said=broken[mutant.test])
    with _copy_of(sound) as folder:
      file = folder / PACKAGE / mutant.file
      text = file.read_text(encoding="utf-8") if file.is_file() else ""
      if (count := text.count(mutant.old)) != 1:
        said = f"{mutant.file} has the text to replace {count} times"
        return Outcome(mutant=mutant, verdict=STALE, seconds=0.0, said=said)
      file.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
      status, said = self._pytest(folder, [mutant.test])
    verdict = {_PASSED: SURVIVED, _FAILED: CAUGHT}.get(status, f"no result (exit status {status})")
    return Outcome(mutant=mutant, verdict=verdict, seconds=time.monotonic() - start, said=said)

  def _environment(self, folder: pathlib.Path) -> dict[str, str]:
    """This process's environment, with the copy before any installed package, and without stale bytecode."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    environment["COLUMNS"] = "1000"  # pytest cuts its summary to the terminal's width
    # Programs that a fault does not change are compiled once for all.
    environment.setdefault("JAX_COMPILATION_CACHE_DIR", str(self.checkout / ".cache" / "jax"))
    return environment

  def _check_that_the_copy_is_what_runs(self, folder: pathlib.Path) -> None:
    code = f"import {PACKAGE}; print({PACKAGE}.__file__)"
    done = self._python(folder, "-c", code)
    found = pathlib.Path(done.stdout.strip() or "nothing")
    if folder.resolve() not in found.resolve().parents:
      raise RuntimeError(f"Tests would run against {found}, not against the copy in {folder}. {done.stderr.strip()}")

  def _pytest(self, folder: pathlib.Path, tests: Sequence[str]) -> tuple[int, str]:
    """(pytest's exit status, negative if it was stopped; its first line about a failure)."""
    options = (
        "-q",
        "-x",
        "--tb=no",
        "-rfE",
        "--color=no",
        "-p",
        "no:cacheprovider",
        "-o",
        "addopts=--import-mode=importlib",
    )
    done = self._python(folder, "-m", "pytest", *options, *tests)
    lines = done.stdout.splitlines()
    said = [line.partition(" - ")[2] for line in lines if line.startswith(("FAILED ", "ERROR "))]
    if done.returncode not in (_PASSED, _FAILED):
      said = said or (done.stderr.splitlines() or lines)[-1:]
    return done.returncode, said[0][:200] if said else ""

  def _python(self, folder: pathlib.Path, *arguments: str) -> subprocess.CompletedProcess:
    """Runs Python in a copy. A run that takes too long is stopped with all its children."""
    command = [sys.executable, *arguments]
    environment = self._environment(folder)
    pipe = subprocess.PIPE
    with children.Child(command, cwd=folder, env=environment, stdout=pipe, stderr=pipe, text=True) as process:
      try:
        out, err = process.communicate(timeout=self.seconds)
      except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()[0], f"stopped after {self.seconds:.0f} s"
    return subprocess.CompletedProcess(command, process.returncode, out, err)


@contextlib.contextmanager
def _copy_of(checkout: pathlib.Path) -> Iterator[pathlib.Path]:
  with interruption.temporary_folder(prefix="mutant-") as folder:
    for name in COPIED:
      source, target = checkout / name, pathlib.Path(folder, name)
      if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
      elif source.is_file():
        shutil.copy2(source, target)
    yield pathlib.Path(folder)

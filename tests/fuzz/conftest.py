# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Counts the tried inputs and reports the number at the end of `pytest tests/fuzz`."""

import collections

import pytest

_KEY = "inputs tried"


@pytest.fixture
def tried(request, record_property):
  """A function to call with the outcome of each input. The test's report carries them, so that `pytest -n` counts."""
  counts = collections.Counter()
  yield lambda outcome: counts.update([outcome])
  kind = request.node.path.stem.removeprefix("test_")
  record_property(_KEY, (kind, dict(counts)))


def pytest_terminal_summary(terminalreporter):
  found: dict[str, collections.Counter] = {}
  for reports in terminalreporter.stats.values():
    for report in reports:
      for key, value in getattr(report, "user_properties", ()):
        if key == _KEY and report.when == "teardown":
          found.setdefault(value[0], collections.Counter()).update(value[1])
  for kind, counts in sorted(found.items()):
    outcomes = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
    terminalreporter.write_line(f"{_KEY}, {kind}: {sum(counts.values())} ({outcomes})")

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Figures of the pages that come from no table of benchmarks/results, and where they come from."""

import re

_SIZE = "du -sh .venv after `make .venv/installed`"
_TIME = "what the command took on 2 cores"
_TOLERANCE = "MaxText's tests/integration/pipeline_parallelism_test.py: rtol=1e-1"
# (page, words around the figure, where it comes from). A test is named as file::function.
FIGURES = [
    ("README.md", "creates `.venv` (2 GB)", _SIZE),
    ("README.md", "its pipeline tests allow gradients 10 % off", _TOLERANCE),
    (
        "docs/choosing.md",
        "Computing takes about 8 FLOPs for each parameter",
        "2 in forward, 2 in forward again, 4 in backward",
    ),
    (
        "docs/convert.md",
        "for 8 parameters of 64 MiB, each in one chunk, less than 128 MiB",
        "tests/checkpoint/test_convert.py::test_memory_does_not_grow_with_the_checkpoint",
    ),
    ("docs/differences.md", "its pipeline tests allow gradients 10 % off", _TOLERANCE),
    ("docs/first-hour.md", "takes a few minutes and 2 GB", _SIZE),
    ("docs/first-hour.md", "Train in a pipeline (2 minutes)", _TIME),
    ("docs/releasing.md", "(25 minutes on 2 cores at most)", "the longest that `make test` may take"),
    ("docs/reliability.md", "trains the cases below (20 minutes)", _TIME),
    ("docs/reliability.md", "with 2 stages in each slice (3 minutes;", _TIME),
    (
        "docs/seconds.md",
        "The same configuration published twice with other versions differs by 1 to 6 %.",
        "the sources that benchmarks/published.yml names",
    ),
    (
        "docs/trainer-parity.md",
        "the loss is 9 % off after 6 steps",
        "MaxText's trainer with `opt_type=muon`, with and without its pipeline",
    ),
    ("docs/upstream-tests.md", "the test asks for an array of 36 GB", "the error of that test"),
]


def tests() -> set[str]:
  """Returns the tests that are named as sources."""
  return {test for _, _, source in FIGURES for test in re.findall(r"tests/\S+\.py::\w+", source)}

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""A command ends with a result or with the reason why there is none."""

import sys
import time

import pytest

from maxtext_pp_ext.compiled import limits


def run(tmp_path, program: str, **bounds) -> tuple[str | None, int]:
  return limits.run([sys.executable, "-c", program], log=tmp_path / "log", limits=limits.Limits(**bounds), tick=0.02)


def test_a_command_that_succeeds_has_no_failure(tmp_path):
  failure, _ = run(tmp_path, "print('done')")
  assert failure is None
  assert (tmp_path / "log").read_text().strip() == "done"


def test_a_command_that_runs_too_long_is_stopped_and_reported(tmp_path):
  start = time.monotonic()
  failure, _ = run(tmp_path, "import time; time.sleep(60)", seconds=0.3)
  assert "more than 0 s" in failure
  assert time.monotonic() - start < 30


def test_a_command_whose_children_use_too_much_memory_is_stopped_and_reported(tmp_path):
  grandchild = "x = bytearray(200 << 20); import time; time.sleep(60)"
  child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', '{grandchild}'])"
  failure, peak = run(tmp_path, child, memory_bytes=100 << 20, seconds=50)
  assert "host memory" in failure
  assert peak > 100 << 20


@pytest.mark.parametrize(
    "program, reason",
    [
        ("raise ValueError('the reason')", "ValueError: the reason"),
        ("raise ValueError('2 problems:\\n  - one\\n  - two')", "ValueError: 2 problems: - one"),
        ("import sys; sys.exit(3)", "exit status 3, see log"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "killed by signal 9"),
    ],
)
def test_a_failed_command_gives_the_reason(tmp_path, program, reason):
  assert run(tmp_path, program)[0] == reason

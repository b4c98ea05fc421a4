# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""A test that hangs is a failure with a stack, and not a suite that never ends."""

import configparser
import pathlib
import subprocess
import sys

SETUP = pathlib.Path(__file__).resolve().parents[1] / "setup.cfg"
TESTS = "import threading\n\ndef test_that_hangs():\n  threading.Event().wait()\n\ndef test_that_comes_after():\n  pass\n"


def test_a_test_that_hangs_fails_with_a_stack_and_the_others_still_run(tmp_path):
  settings = configparser.ConfigParser()
  settings.read(SETUP)
  limit = settings["tool:pytest"]
  assert 0 < float(limit["faulthandler_timeout"]) <= 600
  (tmp_path / "pytest.ini").write_text(
      f"[pytest]\nfaulthandler_timeout = 1\nfaulthandler_exit_on_timeout = {limit['faulthandler_exit_on_timeout']}\n"
  )
  (tmp_path / "test_it.py").write_text(TESTS)
  command = [sys.executable, "-m", "pytest", "-q", "-n", "1", "-p", "no:cacheprovider", "test_it.py"]
  run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
  assert run.returncode == 1
  assert "1 failed, 1 passed" in run.stdout and "test_it.py::test_that_hangs" in run.stdout
  assert "in test_that_hangs" in run.stderr + run.stdout

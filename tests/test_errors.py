# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Errors that nobody catches."""

import subprocess
import sys

import pytest

PROGRAM = """
from maxtext_pp_ext.errors import Refusal, SetupError
def deep():
  raise {error}("set a=1")
try:
  SetupError("one that is caught")
finally:
  deep()
"""


def _stderr(error, **environment):
  done = subprocess.run(
      [sys.executable, "-c", PROGRAM.format(error=error)],
      capture_output=True,
      text=True,
      check=False,
      env={"PYTHONPATH": ":".join(sys.path), "MAXTEXT_PP_EXT": "off", **environment},
  )
  assert done.returncode == 1
  return done.stderr


def test_the_reason_of_a_refusal_stands_last_and_alone():
  said = _stderr("SetupError")
  assert "Traceback" not in said and said.endswith("\n\nmaxtext_pp_ext.errors.SetupError: set a=1\n")


@pytest.mark.parametrize("error, filtering", [("SetupError", "off"), ("ValueError", "auto"), ("RuntimeError", "auto")])
def test_a_traceback_is_shown_of_all_other_errors_and_where_it_is_asked_for(error, filtering):
  said = _stderr(error, JAX_TRACEBACK_FILTERING=filtering)
  assert "Traceback" in said and "in deep" in said and said.rstrip().endswith("set a=1")

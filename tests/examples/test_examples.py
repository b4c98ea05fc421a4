# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Each example can be trained as it is, `check` has nothing to say against it, and its line in the README is true."""

import os
import re
import subprocess
import sys

import pytest

from tests.examples import table
from tests.marks import slow_but
from tests.tables import between

QUICK = ("laptop-experts", "llama3-8b-8-slices-of-v6e-8")
LAPTOP = [name for name in table.NAMES if name.startswith("laptop")]


@pytest.fixture(scope="module", autouse=True)
def connected():
  import maxtext_pp_ext

  maxtext_pp_ext.install()


def test_the_readme_lists_all_examples():
  listed = re.findall(r"^\| \[([\w.-]+)\]\(\1\.yml\)", between(table.README), re.MULTILINE)
  assert listed == table.NAMES


@pytest.mark.parametrize("name", slow_but(QUICK, table.NAMES))
def test_check_accepts_it_and_its_line_in_the_readme_is_true(name):
  assert table.line(name) in between(table.README).splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("name", LAPTOP)
def test_it_trains_on_a_laptop(name, tmp_path):
  environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "PYTHONPATH": os.getcwd()}
  arguments = (str(table.FOLDER / f"{name}.yml"), f"base_output_directory={tmp_path}")
  # Not MaxText's own module: the environment of the tests may be without the start-up hook.
  command = [sys.executable, "-m", "maxtext_pp_ext.train", *arguments]
  done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
  assert done.returncode == 0, done.stderr[-4000:]
  log = done.stdout + done.stderr
  assert "pipeline_impl=circular_bsw is active" in log
  losses = [float(loss) for loss in re.findall(r"completed step: \d+,.*? loss: ([\d.]+)", log)]
  assert len(losses) == 20 and losses[-1] < losses[0] - 1

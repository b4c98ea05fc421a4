# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The commands of docs/first-hour.md: what they print is on the page, and the checkpoint goes on in a pipeline."""

import os
import re
import shlex
import subprocess
import sys

import pytest

from maxtext_pp_ext import cli
from tests.host.common import ROOT
from tests.host.conftest import installed  # noqa: F401  pylint: disable=unused-import

PAGE = (ROOT / "docs" / "first-hour.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = [
    shlex.split(line) for block in BLOCKS for line in block.replace("\\\n", " ").splitlines() if "examples/" in line
]
TRAINER = ["python", "-m", "maxtext.trainers.pre_train.train"]
TRAINED = [command[len(TRAINER) :] for command in COMMANDS if command[: len(TRAINER)] == TRAINER]


@pytest.fixture
def check(installed, capfd, monkeypatch):  # noqa: F811  pylint: disable=redefined-outer-name
  import maxtext.utils.model_creation_utils  # noqa: F401  it prints when it is first imported

  monkeypatch.chdir(ROOT)
  capfd.readouterr()

  def run(*arguments):
    status = cli.main(["check", *arguments])
    return status, capfd.readouterr().out

  return run


def test_the_page_has_what_check_prints(check):
  assert ["maxtext-pp", "check", "examples/laptop-pipeline.yml"] in COMMANDS
  status, out = check("examples/laptop-pipeline.yml")
  assert status == 0 and out in BLOCKS


@pytest.mark.parametrize("arguments", TRAINED, ids=" ".join)
def test_check_accepts_each_run(check, arguments):
  assert check(*(argument.replace("$PWD", str(ROOT)) for argument in arguments))[0] == 0


def test_what_the_page_says_of_changes_is_so(check):
  changes = re.findall(r"^- `([^`]*)`", PAGE.partition("Change something")[2].partition("##")[0], re.MULTILINE)
  said = [check("examples/laptop-pipeline.yml", *shlex.split(change)) for change in changes]
  assert [status for status, _ in said] == [0, 2, 0, 0]
  smaller, refused, circular, window = (out for _, out in said)
  assert "bubble fraction 0.273" in smaller
  assert "num_pipeline_microbatches=4 or num_pipeline_microbatches=8." in refused
  assert "weights that stay gathered" not in circular and "no pipeline" in window and "bubble" not in window


@pytest.mark.slow
def test_the_checkpoint_goes_on_in_a_pipeline(tmp_path):
  (tmp_path / "examples").symlink_to(ROOT / "examples")
  environment = os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
  # Not MaxText's own module and the installed command: the environment of the tests may be without them.
  module = {"python": ("maxtext_pp_ext.train", len(TRAINER)), "maxtext-pp": ("maxtext_pp_ext.cli", 1)}
  after = COMMANDS[COMMANDS.index(next(command for command in COMMANDS if "run_name=plain" in command)) :]
  said = []
  for command in after:
    name, skipped = module[command[0]]
    arguments = (argument.replace("$PWD", str(tmp_path)) for argument in command[skipped:])
    done = subprocess.run(
        [sys.executable, "-m", name, *arguments],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    said.append(done.stdout + done.stderr)
  assert len(said) == 3 and "completed step: 9," in said[0] and "completed step: 10," not in said[0]
  assert "completed step: 10," in said[2] and "completed step: 9," not in said[2]

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""What a shell is told at Tab."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("argcomplete")


@pytest.fixture
def complete(tmp_path):
  (tmp_path / "my.yml").touch()
  (tmp_path / "my.txt").touch()

  def run(line):
    said = tmp_path / "said"
    environment = os.environ | {
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_IFS": "\n",
        "_ARGCOMPLETE_COMP_WORDBREAKS": " \t\n\"'><=;|&(:",  # bash's
        "_ARGCOMPLETE_STDOUT_FILENAME": str(said),
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    program = "import sys; from maxtext_pp_ext import cli; sys.argv = ['maxtext-pp']; cli.main()"
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environment, check=True, timeout=60)
    return [text.strip() for text in said.read_text().splitlines()]

  return run


OFFERED = {
    "a subcommand": ("maxtext-pp pl", ["plan"]),
    "an option": ("maxtext-pp plan --dev", ["--devices", "--device-memory-gib"]),
    "an option's name": ("maxtext-pp plan --chip v5", ["v5e", "v5p"]),
    "a key": ("maxtext-pp check my.yml pipeline_gat", ["pipeline_gather_dtype="]),
    "a key of MaxText after an option": ("maxtext-pp plan --devices 8 ici_pipe", ["ici_pipeline_parallelism="]),
    "a value after bash's word break": ("maxtext-pp check pipeline_impl=circular_a", ["circular_ag_once"]),
    "a model": ("maxtext-pp plan --devices 8 model_name=llama3-7", ["llama3-70b"]),
    "a policy": ("maxtext-pp plan remat_policy=fu", ["full"]),
    "a topology": ("maxtext-pp plan compile_topology=v5p-25", ["v5p-256", "v5p-2560"]),
    "a file of the right kind": ("maxtext-pp check my", ["my.yml"]),
    "nothing for a number": ("maxtext-pp plan --devices ", []),
}


@pytest.mark.parametrize("line, offered", OFFERED.values(), ids=OFFERED.keys())
def test_a_shell_is_offered_what_may_follow(complete, line, offered):
  assert complete(line) == offered

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Who follows the pages in a checkout leaves nothing in it that git would list."""

import pathlib
import re
import shutil
import subprocess

import pytest

CHECKOUT = pathlib.Path(__file__).resolve().parents[2]
PAGES = [*CHECKOUT.glob("*.md"), *CHECKOUT.glob("docs/*.md"), *CHECKOUT.glob("examples/**/*.md")]
CONFIGS = [*CHECKOUT.glob("examples/**/*.yml")]
FILE = re.compile(r"--(?:output|trace|picture|result|write)\s+([\w./-]+\.\w+)")
FOLDER = re.compile(r"""base_output_directory[=:]\s*"?(?:\$PWD/)?(\w+)(?![\w:])"?""")
INSTALLED = re.compile(r"pip install .*?\./(\S+)")


@pytest.mark.skipif(shutil.which("git") is None or not (CHECKOUT / ".git").exists(), reason="needs a checkout of git")
def test_git_ignores_what_the_commands_of_the_pages_write():
  texts = [page.read_text(encoding="utf-8") for page in (*PAGES, *CONFIGS)]
  written = {name for text in texts for pattern in (FILE, FOLDER) for name in pattern.findall(text)}
  written |= {f"{folder}/build" for text in texts for folder in INSTALLED.findall(text)}
  assert {"out", "step.json.gz", "examples/own-pipeline/build"} <= written
  of_git = {"cwd": CHECKOUT, "capture_output": True, "text": True, "check": False}
  git = lambda *arguments: subprocess.run(["git", *arguments], **of_git)
  tracked = set(git("ls-files").stdout.split())
  seen = [
      name
      for name in sorted(written - tracked)
      if git("check-ignore", "-q", name).returncode and git("check-ignore", "-q", f"{name}/a").returncode
  ]
  assert seen == []

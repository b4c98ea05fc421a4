# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The scripts of patches/reports run, and print what their pages say."""

import os
import pathlib
import re
import subprocess
import sys

import maxtext
from maxtext import version
import pytest

REPORTS = pathlib.Path(__file__).resolve().parents[2] / "patches" / "reports"
MAXTEXT = pathlib.Path(maxtext.__path__[0])
PAGES = sorted(page.stem for page in REPORTS.glob("*.md"))
SCRIPT = re.compile(r"^```python\n(.*?)^```\n\nIt prints:\n\n```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMANDS = re.compile(r"^```sh\n(.*?)^```.*?^```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)
WITH_COMMANDS = [page for page in PAGES if COMMANDS.search((REPORTS / f"{page}.md").read_text(encoding="utf-8"))]
# Files with the code that is quoted; the tests of MaxText are not in its wheel.
QUOTED = {"gemma4-bypass": "layers/nnx_decoders.py", "dropped-arguments": "layers/nnx_decoders.py"}

pytestmark = pytest.mark.skipif(version.__version__ != "0.2.5", reason="the reports are about MaxText 0.2.5")


def scripts() -> dict[str, tuple[str, str]]:
  found = {page: SCRIPT.findall((REPORTS / f"{page}.md").read_text(encoding="utf-8")) for page in PAGES}
  return {page: blocks[0] for page, blocks in found.items() if blocks}


@pytest.mark.slow  # each imports MaxText in a process of its own
@pytest.mark.parametrize("page", list(scripts()))
def test_a_script_prints_what_its_report_says(page, tmp_path):
  script, expected = scripts()[page]
  (tmp_path / "report.py").write_text(script)
  environment = os.environ | {"MAXTEXT_PP_EXT": "off", "JAX_PLATFORMS": "cpu", "DECOUPLE_GCLOUD": "TRUE"}
  # The same arithmetic for everybody, though the tests' own programs are compiled without optimizations.
  environment["XLA_FLAGS"] = ""
  command = [sys.executable, "report.py"]
  done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600, check=False)
  assert done.returncode == 0, done.stderr[-4000:]
  printed = [line for line in done.stdout.splitlines() if not line.startswith(("[DECOUPLED", "[transformers"))]
  assert printed[-len(expected.splitlines()) :] == expected.splitlines()


@pytest.mark.slow  # most train
@pytest.mark.parametrize("page", WITH_COMMANDS)
def test_commands_run_as_they_are_written_and_print_what_their_report_says(page, tmp_path):
  text = (REPORTS / f"{page}.md").read_text(encoding="utf-8")
  path = os.pathsep.join((str(pathlib.Path(sys.executable).parent), os.environ["PATH"]))  # where python is this one
  environment = os.environ | {"MAXTEXT_PP_EXT": "off", "PATH": path}
  for commands, expected in COMMANDS.findall(text):
    program = ["bash", "-c", commands]
    options = {"capture_output": True, "text": True, "timeout": 600, "check": False}
    done = subprocess.run(program, cwd=tmp_path, env=environment, **options)
    lines = (done.stdout + done.stderr).splitlines()
    for parts in (line.split("…") for line in expected.splitlines()):
      assert any(all(part in line for part in parts) for line in lines), (parts, lines[-20:])


def headings(page: str) -> list[str]:
  return re.findall(r"^## (.*)$", (REPORTS / f"{page}.md").read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize("page", [page for page in PAGES if page not in ("README", "sharding-rules")])
def test_a_report_of_a_defect_answers_the_same_questions_in_the_same_order(page):
  assert headings(page) == ["Expected", "Actual", "How to show it", "Environment", "Cause", "Proposed change"]


def test_a_feature_request_says_what_is_wanted_and_why_it_cannot_be_done():
  asked = ["What one wants to do", "Why it cannot be done today", "Requested feature", "Environment"]
  assert headings("sharding-rules") == asked


def test_a_report_can_be_pasted_elsewhere():
  links = {page: re.findall(r"\]\((?!https?:)[^)]*\)", (REPORTS / f"{page}.md").read_text("utf-8")) for page in PAGES}
  assert {page for page, found in links.items() if found} == {"README"}  # no other page has links that lead to its folder
  _, _, change = (REPORTS / "bsw-three-stages.patch").read_text("utf-8").partition("\n\n---")
  assert change and f"---{change}" in (REPORTS / "bsw-three-stages.md").read_text("utf-8")


@pytest.mark.parametrize("page", QUOTED)
def test_what_a_report_quotes_is_in_maxtext(page):
  blocks = re.findall(r"^```python\n(.*?)^```$", (REPORTS / f"{page}.md").read_text(encoding="utf-8"), re.M | re.S)
  quotes = [block for block in blocks if block not in scripts().get(page, ())]
  source = (MAXTEXT / QUOTED[page]).read_text(encoding="utf-8")
  assert quotes and all(quote in source for quote in quotes)


def test_the_fix_of_the_window_applies():
  _, _, text = (REPORTS / "bsw-three-stages.patch").read_text(encoding="utf-8").partition("\n\n---")
  removed = [line[1:] for line in text.splitlines() if re.match(r"-(?!--)", line)]
  source = (MAXTEXT / "layers" / "pipeline.py").read_text(encoding="utf-8").splitlines()
  assert removed and all(source.count(line) == 1 for line in removed)


def test_the_readme_lists_every_report():
  listed = re.findall(r"^\| \[([\w-]+)\.md\]", (REPORTS / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
  assert sorted([*listed, "README"]) == PAGES

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""`make docs` can write the pages that git ignores, and what it writes is consistent."""

import re
import shutil
import subprocess

import pytest

from tests import tables
from tests.docs import pages, test_links

ROW = re.compile(r"^\|(.*)\|$", re.MULTILINE)


@pytest.fixture(scope="module", params=pages.GENERATED)
def written(request):
  return request.param, pages.text(request.param)


def test_a_written_page_has_a_heading_and_rows_as_wide_as_their_table(written):
  page, text = written
  assert text.startswith("# ") and len(ROW.findall(text)) > 20, page
  for table in re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE):
    widths = {re.sub(r"\\\||`[^`]*`", "", row).count("|") for row in table.splitlines()}
    assert len(widths) == 1, (page, table.splitlines()[0], widths)


def test_links_of_a_written_page_lead_to_pages_that_are_there_or_are_written(written):
  page, text = written
  for link in re.findall(r"\]\(([^()\s]+)\)", test_links.CODE.sub("`code`", text)):
    file, _, anchor = link.partition("#")
    target = (pages.DOCS / file).resolve()
    assert target in test_links.WRITTEN or target.exists(), (page, link)
    assert not anchor or anchor in test_links.anchors(target), (page, link)


def test_every_case_of_the_trainers_has_a_result_that_agrees():
  from tests.trainer import cases

  results = tables.read(pages.CHECKOUT / pages.GENERATED["trainer-table.md"])
  assert list(results) == [case.name for case in cases.all_cases()] and all(each["agrees"] for each in results.values())
  assert all(a <= b for each in results.values() for a, b in zip(each["differences"], each["allowed"], strict=True))


def test_what_a_written_page_is_made_of_is_named_where_pages_are_listed():
  index = (pages.DOCS / "README.md").read_text(encoding="utf-8")
  for page, source in pages.GENERATED.items():
    assert (pages.CHECKOUT / source).is_file() and f"](../{source})" in index and f"`{page}`" in index, page


@pytest.mark.skipif(
    shutil.which("git") is None or not (pages.CHECKOUT / ".git").exists(), reason="needs a checkout of git"
)
def test_git_ignores_written_pages_and_has_none():
  git = lambda *arguments: subprocess.run(
      ["git", *arguments, *(f"docs/{page}" for page in pages.GENERATED)],
      cwd=pages.CHECKOUT,
      capture_output=True,
      text=True,
      check=False,
  ).stdout.split()
  assert git("ls-files") == [] and len(git("check-ignore", "--no-index")) == len(pages.GENERATED)

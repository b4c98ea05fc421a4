# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Links lead somewhere, every page can be reached from docs/README.md, and together the pages are short."""

import pathlib
import re

import pytest

from tests.docs import pages

CHECKOUT = pathlib.Path(__file__).resolve().parents[2]
DOCS = CHECKOUT / "docs"
WRITTEN = {DOCS / name for name in pages.GENERATED}  # not in the repository
PAGES = sorted(
    page
    for pattern in ("*.md", "docs/*.md", "docs/site/**/*.md", "benchmarks/**/*.md", "patches/*/*.md")
    for page in CHECKOUT.glob(pattern)
    if page not in WRITTEN
)
MOST_WORDS = 21_800
CODE = re.compile(r"^```.*?^```$|`[^`\n]*`", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^()\s]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


def links(page: pathlib.Path) -> list[str]:
  """Relative links of a page, including images. Text in code that looks like a link is left out."""
  text = CODE.sub("`code`", page.read_text(encoding="utf-8"))
  return [link for link in LINK.findall(text) if not re.match(r"[a-z]+:", link)]


def anchors(page: pathlib.Path) -> set[str]:
  """The anchors that GitHub gives to a page's headings, which are distinct in ours."""
  text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
  return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in HEADING.findall(text)}


@pytest.mark.parametrize("page", PAGES, ids=[page.relative_to(CHECKOUT).as_posix() for page in PAGES])
def test_every_relative_link_and_anchor_leads_somewhere(page):
  for link in links(page):
    file, _, anchor = link.partition("#")
    target = (page.parent / file).resolve() if file else page
    assert target.exists() and target not in WRITTEN, link
    assert not anchor or anchor in anchors(target), link


def test_the_index_lists_every_page():
  listed = {(DOCS / link).resolve() for link in links(DOCS / "README.md")}
  assert listed >= set(DOCS.glob("*.md")) - WRITTEN - {DOCS / "README.md"}
  assert DOCS / "README.md" in {(CHECKOUT / link).resolve() for link in links(CHECKOUT / "README.md")}


def test_the_pages_that_people_write_can_be_read_in_two_hours():
  by_directives = DOCS / "site" / "api"  # lists of names, whose text is in the code
  pages = (page for page in DOCS.rglob("*.md") if page not in WRITTEN and by_directives not in page.parents)
  written = [CHECKOUT / "README.md", *pages]
  words = {page.relative_to(CHECKOUT).as_posix(): len(page.read_text(encoding="utf-8").split()) for page in written}
  assert sum(words.values()) <= MOST_WORDS, words


def test_every_source_file_that_a_page_names_is_there():
  package = [CHECKOUT / "maxtext_pp_ext", CHECKOUT]
  not_ours = ("CHANGELOG.md", "upstream-tests.md")  # of earlier versions, of MaxText
  for page in (page for page in PAGES if page.parent in (CHECKOUT, DOCS) and page.name not in not_ours):
    for name in re.findall(r"`((?:\w+/)+\w+\.(?:py|json|yml))`", page.read_text(encoding="utf-8")):
      assert name.startswith("maxtext/") or any((folder / name).exists() for folder in package), (page.name, name)

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Links of the documentation lead somewhere, and every page can be reached from docs/README.md."""

import pathlib
import re

import pytest

CHECKOUT = pathlib.Path(__file__).resolve().parents[2]
DOCS = CHECKOUT / "docs"
PAGES = sorted(
    page
    for pattern in ("*.md", "docs/*.md", "benchmarks/*.md", "benchmarks/results/*.md", "patches/*/*.md")
    for page in CHECKOUT.glob(pattern)
)
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
    assert target.exists(), link
    assert not anchor or anchor in anchors(target), link


def test_the_index_lists_every_page():
  listed = {(DOCS / link).resolve() for link in links(DOCS / "README.md")}
  assert listed >= set(DOCS.glob("*.md")) - {DOCS / "README.md"}
  assert DOCS / "README.md" in {(CHECKOUT / link).resolve() for link in links(CHECKOUT / "README.md")}

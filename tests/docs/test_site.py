# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""What the site lists as API is public, and its search knows which pages are guides. Builds nothing."""

import ast
import pathlib
import re

import pytest

from tests.docs import pages

SITE = pages.DOCS / "site"
API = sorted((SITE / "api").glob("*.md"))
DIRECTIVE = re.compile(r"^\.\. auto(?:function|class|exception):: (\S+)", re.MULTILINE)


def listed(page: pathlib.Path) -> list[str]:
  return DIRECTIVE.findall(page.read_text(encoding="utf-8"))


def public(module: str) -> set[str]:
  """What a module exports: its `__all__`, or without one the functions and classes that it defines."""
  path = pages.CHECKOUT / module.replace(".", "/")
  file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
  body = ast.parse(file.read_text(encoding="utf-8")).body
  for each in body:
    if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == "__all__":
      return set(ast.literal_eval(each.value))
  return {each.name for each in body if isinstance(each, ast.FunctionDef | ast.ClassDef) and each.name[0] != "_"}


@pytest.mark.parametrize("page", API, ids=lambda page: page.name)
def test_what_a_page_lists_is_public(page):
  names = [name.rpartition(".") for name in listed(page)]
  assert [name for module, _, name in names if name not in public(module)] == []


def test_the_page_of_sharding_has_what_its_guide_calls_and_leaves_out_what_only_the_engine_does():
  assert "   :no-members:\n" in (SITE / "api" / "sharding.md").read_text(encoding="utf-8")
  names = {name.rpartition(".")[2] for name in listed(SITE / "api" / "sharding.md")}
  guide = set(re.findall(r"sharding\.(\w+)\(", (pages.DOCS / "sharding.md").read_text(encoding="utf-8")))
  assert guide and guide <= names
  assert not names & {"automatic", "divisible_spec", "gathered_last", "gathered_spec", "is_explicit", "run_automatic"}


def test_the_search_puts_tables_that_are_written_behind_the_guides():
  assert '"scorer.js"' in (SITE / "conf.py").read_text(encoding="utf-8")
  scorer = (SITE / "scorer.js").read_text(encoding="utf-8")
  no_guides = re.search(r"\(\?!([\w|-]+)\)", scorer)
  assert no_guides and set(no_guides[1].split("|")) == {"README", *(page.removesuffix(".md") for page in pages.GENERATED)}


def test_the_first_page_has_the_window_and_the_picture_of_the_readme():
  first = (SITE / "index.md").read_text(encoding="utf-8")
  readme = (pages.CHECKOUT / "README.md").read_text(encoding="utf-8")
  assert "](../window.md)" in first
  assert set(re.findall(r"docs/(images/\S+?)\)", readme)) <= set(re.findall(r"\.\./(images/\S+?)\)", first))

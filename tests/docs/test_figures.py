# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Every figure of README.md and docs/*.md is that of the table it comes from, or its source is named.

`figures/` has the sentences, written from the tables of benchmarks/results. Its `elsewhere.py` has the figures that come
from elsewhere.
"""

from collections.abc import Callable, Iterable, Iterator
import functools
import re

import pytest

from tests.docs import pages
from tests.docs.figures import choosing, comparison, computed, elsewhere, seconds, window
from tests.docs.figures.results import CHECKOUT, text_of

PAGES = [page.relative_to(CHECKOUT).as_posix() for page in pages.by_hand()]
SENTENCES: dict[str, Callable[[], Iterator[str]]] = {
    "README.md": comparison.readme,
    "docs/batch-split.md": window.batch_split,
    "docs/choosing.md": choosing.choosing,
    "docs/differences.md": comparison.differences,
    "docs/first-hour.md": computed.first_hour,
    "docs/how-it-works.md": computed.how_it_works,
    "docs/parity.md": computed.parity,
    "docs/quantization.md": computed.quantization,
    "docs/releasing.md": comparison.releasing,
    "docs/reliability.md": computed.reliability,
    "docs/seconds.md": seconds.seconds,
    "docs/trainer-parity.md": computed.trainer_parity,
    "docs/window.md": window.window,
}
NUMBER = r"\d+(?:,\d{3})*(?:\.\d+)?"
UNIT = r"(?:[kMGT]i?B|s|ms|µs|seconds?|minutes?|hours?|%|times|[KMGTP]?FLOPs?(?:/s)?)(?!\w)"
# A number with a unit, or with one point: it may be a ratio, or share another one's unit. Versions have more points, and
# numbers such as 1e-5 are tolerances.
FIGURE = re.compile(rf"(?<![\w.-])(?<!Python )(?<!Flax )(?:{NUMBER}\s?{UNIT}|\d+\.\d+(?!\w|\.\d))")
TABLE = re.compile(r"(?:^\|.*\|$\n?)+", re.MULTILINE)
CELL = re.compile(rf"(?<=\|) *(?:≤ )?{NUMBER} *(?=\|)")
UNIT_IN_HEADER = re.compile(rf"(?<![\w'’]){UNIT}")
# Blocks of code, fenced or indented, code within a line, targets of links.
CODE = re.compile(r"^```.*?^```$|(?<=\n\n)(?:    [^\n]*\n)+|`[^`]*`|(?<=\])\([^)\s]*\)", re.MULTILINE | re.DOTALL)
WHAT_TO_DO = """Nobody holds these figures:
{figures}
If they come from a table, write the sentence into tests/docs/figures. If not, name the source in elsewhere.py there."""


@functools.cache
def sentences_of(page: str) -> list[str]:
  return list(SENTENCES[page]()) if page in SENTENCES else []


def pattern(sentence: str) -> re.Pattern:
  """Returns what finds a sentence, wherever the page breaks its lines."""
  return re.compile(r"\s+".join(map(re.escape, sentence.split())))


def spans(sentences: Iterable[str], text: str) -> Iterator[tuple[int, int]]:
  return (match.span() for sentence in sentences for match in pattern(sentence).finditer(text))


def figures_of(text: str) -> Iterator[re.Match]:
  """Yields the figures of a page, code left out."""
  code = [match.span() for match in CODE.finditer(text)]
  found = list(FIGURE.finditer(text))
  for table in TABLE.finditer(text):
    if UNIT_IN_HEADER.search(table.group().partition("\n")[0]):
      found += CELL.finditer(text, *table.span())
  return (match for match in found if not is_within(match, code))


def is_within(match: re.Match, places: Iterable[tuple[int, int]]) -> bool:
  return any(begin <= match.start() and match.end() <= end for begin, end in places)


@pytest.mark.parametrize("page", SENTENCES)
def test_a_page_has_the_figures_of_the_tables(page):
  text = text_of(page)
  wrong = [" ".join(sentence.split()) for sentence in sentences_of(page) if not pattern(sentence).search(text)]
  assert not wrong, f"{page} should say, by the tables:\n" + "\n".join(f"- {sentence}" for sentence in wrong)


@pytest.mark.parametrize("page", PAGES)
def test_every_figure_of_a_page_is_that_of_a_table_or_has_a_source(page):
  text = text_of(page)
  held = [*spans(sentences_of(page), text), *spans((words for of, words, _ in elsewhere.FIGURES if of == page), text)]
  free = [match for match in figures_of(text) if not is_within(match, held)]
  lines = [f"- {page}:{text.count(chr(10), 0, match.start()) + 1}: {match.group().strip()}" for match in free]
  assert not free, WHAT_TO_DO.format(figures="\n".join(lines))


@pytest.mark.parametrize("page, words", [(page, words) for page, words, _ in elsewhere.FIGURES])
def test_a_figure_with_another_source_is_on_its_page(page, words):
  text = text_of(page)
  places = list(spans([words], text))
  assert places and any(is_within(match, places) for match in figures_of(text)), f"{page} has no figure in: {words}"


@pytest.mark.parametrize("test", sorted(elsewhere.tests()))
def test_a_test_that_is_named_as_a_source_is_there(test):
  file, _, name = test.partition("::")
  assert f"\ndef {name}(" in (CHECKOUT / file).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "text, figures",
    [
        ("It needs 28.4 GB, plain 29.0. So 2 to 3\n% less, 1,024 times.", ["28.4 GB", "29.0", "3\n%", "1,024 times"]),
        ("MaxText 0.2.5 with 4 × 2 devices, 1e-5 off, `9 GB` and [1 s](a-9.5.md).\n```\n7 s\n```\n", ["1 s"]),
        ("2.6 × the memory of v5p-8 in 5 seconds each, 8s here", ["2.6", "5 seconds", "8s"]),
        ("| a | b, GB |\n|---|---|\n| MaxText's 3 | ≤ 46 |\n\n| a |\n|---|\n| 5 |\n", ["≤ 46"]),
    ],
)
def test_a_figure_is_a_number_with_a_unit_or_a_point_or_in_a_table_with_a_unit(text, figures):
  assert [match.group().strip() for match in figures_of(text)] == figures

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""What somebody who mistyped a name may have meant, and numbers next to a number. Standard library only."""

from collections.abc import Iterable
import difflib


def nearest(word: object, choices: Iterable[str], count: int = 3) -> list[str]:
  """The choices that are most like a word, the most similar first; [] if none is."""
  by_key = {_key(choice): choice for choice in choices}
  return [by_key[found] for found in difflib.get_close_matches(_key(word), by_key, n=count, cutoff=0.6)]


def did_you_mean(word: object, choices: Iterable[str], count: int = 1) -> str:
  """The end of a sentence about an unknown word: a question, or a full stop if no choice is like it."""
  found = nearest(word, choices, count)
  return f"; did you mean {' or '.join(map(repr, found))}?" if found else "."


def beside(number: int, candidates: Iterable[int]) -> list[int]:
  """The candidates next to a number, the last one up to it and the first one above it, the nearer first."""
  below, above = ([each for each in sorted(candidates) if (each > number) == up] for up in (False, True))
  return sorted([*below[-1:], *above[:1]], key=lambda each: abs(each - number))


def _key(word: object) -> str:
  return str(word).casefold().replace("-", "_").replace(" ", "_")

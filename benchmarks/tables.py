# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads and writes results: a JSON file per benchmark with all figures, and a Markdown file with its tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
import json
import pathlib
from typing import Any

MISSING = "–"


def read(file: pathlib.Path) -> dict[str, Any]:
  """The results of earlier runs; empty if there are none."""
  return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def write(file: pathlib.Path, results: dict[str, Any]) -> None:
  file.parent.mkdir(parents=True, exist_ok=True)
  file.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def scaled(rows: Iterable[tuple[str, Mapping[str, Any]]]) -> list[str]:
  """A sentence on rows whose figures have `scaled`: what has been scaled in them since they were compiled."""
  of: dict[str, list[str]] = {}
  for name, figures in rows:
    if "scaled" in figures:
      of.setdefault(figures["scaled"], []).append(name)
  return [f"Not compiled again, but scaled: {what}. So it is with {'; '.join(names)}." for what, names in of.items()]


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
  """A table whose first column is text and whose others are numbers, aligned for reading as plain text."""
  widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

  def line(cells: Sequence[str]) -> str:
    padded = [cells[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True))]
    return f"| {' | '.join(padded)} |"

  rule = [f":{'-' * max(widths[0] - 1, 2)}", *(f"{'-' * max(width - 1, 2)}:" for width in widths[1:])]
  return "\n".join([line(header), f"| {' | '.join(rule)} |", *(line(row) for row in rows)])


def number(value: float | None, digits: int = 1) -> str:
  return MISSING if value is None else f"{value:.{digits}f}"


def with_ratio(value: float | None, base: float | None, digits: int = 1) -> str:
  """`36.1 (0.91×)`, the ratio to the base in parentheses if there is one."""
  if value is None or not base:
    return number(value, digits)
  return f"{value:.{digits}f} ({value / base:.2f}×)"

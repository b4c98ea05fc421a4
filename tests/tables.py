# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tables in documents that a command writes, between two comments."""

from __future__ import annotations

from collections.abc import Iterable
import pathlib

_BEGIN, _END = "<!-- table begins -->\n", "<!-- table ends -->\n"


def between(document: pathlib.Path) -> str:
  """The text between the two comments."""
  return document.read_text(encoding="utf-8").split(_BEGIN)[1].split(_END)[0]


def put_between(document: pathlib.Path, lines: Iterable[str]) -> None:
  """Writes lines between the two comments, in place of what is there."""
  before, rest = document.read_text(encoding="utf-8").split(_BEGIN)
  after = rest.split(_END)[1]
  document.write_text("".join([before, _BEGIN, *(f"{line}\n" for line in lines), _END, after]), encoding="utf-8")

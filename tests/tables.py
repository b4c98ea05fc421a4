# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tables in documents that a command writes, between two comments, and the data of tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
import json
import pathlib
from typing import Any

_BEGIN, _END = "<!-- table begins -->\n", "<!-- table ends -->\n"


def between(document: pathlib.Path) -> str:
  """The text between the two comments."""
  return document.read_text(encoding="utf-8").split(_BEGIN)[1].split(_END)[0]


def put_between(document: pathlib.Path, lines: Iterable[str]) -> None:
  """Writes lines between the two comments, in place of what is there."""
  before, rest = document.read_text(encoding="utf-8").split(_BEGIN)
  after = rest.split(_END)[1]
  document.write_text("".join([before, _BEGIN, *(f"{line}\n" for line in lines), _END, after]), encoding="utf-8")


def read(file: pathlib.Path) -> dict[str, Any]:
  """The rows of a file that `write` wrote, by name; none if there is no file."""
  return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def write(file: pathlib.Path, rows: Mapping[str, Any]) -> None:
  """Writes rows as JSON, one in a line."""
  lines = (f"  {json.dumps(name)}: {json.dumps(row, ensure_ascii=False)}" for name, row in rows.items())
  file.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The commands of docs/choosing.md that compile nothing print what is on the page."""

import re
import shlex

import pytest

from maxtext_pp_ext import cli
from tests.docs.figures.results import text_of
from tests.host.conftest import installed  # noqa: F401  pylint: disable=unused-import

BLOCKS = re.findall(r"^```\n(.*?)^```$", text_of("docs/choosing.md"), re.MULTILINE | re.DOTALL)
ESTIMATES = re.compile(r"maxtext-pp (?:plan|check) ")


def commands() -> dict[str, list[str]]:
  """Returns the lines below each command, in its block and in the blocks behind it; `…` stands for others."""
  found: dict[str, list[str]] = {}
  for block in BLOCKS:
    first, *lines = re.sub(r" \\\n\s*", " ", block).splitlines()
    if first.startswith("maxtext-pp"):
      command = first
    else:
      lines.insert(0, first)
    found.setdefault(command, []).extend(lines)
  return {command: lines for command, lines in found.items() if ESTIMATES.match(command)}


@pytest.mark.parametrize("command", commands())
def test_a_command_prints_what_is_on_the_page(command, installed, capfd):  # noqa: F811
  import maxtext.utils.model_creation_utils  # noqa: F401  it prints when it is first imported

  capfd.readouterr()
  cli.main(shlex.split(command)[1:])
  printed = capfd.readouterr().out.splitlines()
  lines = commands()[command]
  assert len(lines) > 2
  missing = [line for line in lines if line.strip() != "…" and line not in printed]
  assert not missing, f"{command} prints:\n" + "\n".join(printed)

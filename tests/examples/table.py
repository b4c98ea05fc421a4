# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.examples.table` checks the examples and writes the table of examples/README.md: a minute."""

from __future__ import annotations

import argparse
import pathlib
import re

from maxtext_pp_ext import units
from maxtext_pp_ext.cli import maxtext
from tests.tables import put_between

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "examples"
README = FOLDER / "README.md"
NAMES = sorted(file.stem for file in FOLDER.glob("*.yml"))
HEADINGS = ("example", "devices", "layers", "microbatches", "bubble", "memory", "sent", "between slices", "step s")


def main() -> None:
  argparse.ArgumentParser(prog="python -m tests.examples.table", description=__doc__).parse_args()
  maxtext.prepare()
  lines = [f"| {' | '.join(HEADINGS)} |", "|" + "---|" * len(HEADINGS), *map(line, NAMES)]
  put_between(README, lines)


def line(name: str) -> str:
  """The line of an example: what `maxtext-pp check` finds, the estimated seconds included.

  Raises:
    ValueError: the example cannot be trained, or something in it may surprise a user.
  """
  from maxtext_pp_ext.plan import check  # pylint: disable=import-outside-toplevel

  file = FOLDER / f"{name}.yml"
  found = check.check([str(file)])
  if found.errors or found.warnings:
    raise ValueError(f"{file.name}: {' '.join((*found.errors, *found.warnings))}")
  if found.costs is None or found.schedule is None:
    raise ValueError(f"{file.name} has neither a pipeline of ours nor the window.")
  between = found.costs.between_slices
  cells = (
      f"[{name}]({file.name})",
      str(found.devices),
      re.sub(r",? stacked along param_scan_axis=\d", "", found.layout or ""),
      str(found.schedule.microbatches),
      f"{found.schedule.bubble_fraction:.1%}",
      units.bytes_text(found.costs.peak) + (" *" if found.not_counted else ""),
      units.bytes_text(found.costs.sent),
      units.bytes_text(between) if between else "–",
      f"{found.estimate.seconds:.3g}" if found.estimate else "–",
  )
  return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
  main()

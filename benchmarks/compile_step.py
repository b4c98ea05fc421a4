# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""What the commands that compile train steps have in common: their options, and a line of progress for each step."""

from __future__ import annotations

import argparse
import pathlib
from typing import Any

from rich import console as rich_console

from benchmarks import shapes
from maxtext_pp_ext.compiled import limits, step

RESULTS = pathlib.Path(__file__).resolve().parent / "results"
versions = step.versions


def compile_step(
    arguments: list[str],
    *,
    label: str,
    bounds: limits.Limits,
    console: rich_console.Console,
    hlo_file: pathlib.Path | None = None,
) -> dict[str, Any]:
  """Compiles in a process of its own, with a line of progress, and returns the figures, or `failure` with the reason.

  Args:
    arguments: MaxText's, without the yml, or with the name of a preset in front.
    label: for the line of progress.
    bounds: wall time and host memory.
    console: where progress goes.
    hlo_file: keeps the optimised HLO there.
  """
  with console.status(label) as status:
    figures = step.compile_step(
        arguments,
        bounds=bounds,
        hlo_file=hlo_file,
        on_tick=lambda seconds, memory: status.update(f"{label}: {seconds:.0f} s, {memory / limits.GIB:.1f} GiB"),
    )
  figures.pop("bytes", None)  # the same in GB stays
  ending = figures.get("failure") or f"compiled in {figures['compile_s']} s"
  line = f"{label}: {ending} ({figures['host_memory_GiB']} GiB of host memory)"
  console.print(line, markup=False, highlight=False, soft_wrap=True)
  return figures


def parse(
    parser: argparse.ArgumentParser, argv: list[str] | None, *, output: str, impl: list[str], minutes: float = 30.0
) -> argparse.Namespace:
  """Parses the options that all commands have which compile train steps: what, within which limits, and where to."""
  parser.add_argument("--impl", nargs="+", type=shapes.implementation, default=impl, metavar="NAME")
  parser.add_argument("--minutes", type=float, default=minutes, help="wall time for a compilation (default: %(default)s)")
  parser.add_argument("--memory-gib", type=float, default=24.0, help="host memory for it (default: %(default)s)")
  parser.add_argument("--hlo", type=pathlib.Path, help="folder to keep the optimised HLO in")
  parser.add_argument("--output", type=pathlib.Path, default=RESULTS / output)
  options = parser.parse_args(argv)
  options.limits = limits.Limits(seconds=options.minutes * 60, memory_bytes=int(options.memory_gib * limits.GIB))
  if options.hlo:
    options.hlo.mkdir(parents=True, exist_ok=True)
  return options

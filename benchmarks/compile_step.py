# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Common parts of the commands that compile train steps: their options, and a line of progress for each step."""

from __future__ import annotations

import argparse
import pathlib
from typing import Any

from rich import console as rich_console

from benchmarks import shapes
from maxtext_pp_ext.compiled import best_flags, child, compare, flags, limits
from maxtext_pp_ext.hardware import chips

RESULTS = pathlib.Path(__file__).resolve().parent / "results"
versions = child.versions


def compile_step(
    arguments: list[str],
    *,
    label: str,
    bounds: limits.Limits,
    console: rich_console.Console,
    hlo_file: pathlib.Path | None = None,
) -> dict[str, Any]:
  """Compiles in a separate process, with a line of progress; returns the figures, or `failure` with the reason.

  The figures are those of `compare.figures` without `transfers` and `overlap`, and with sizes in GB.

  Args:
    arguments: MaxText's command-line arguments, without the yml file, or with a preset's name in its place.
    label: the text of the line of progress.
    bounds: limits of wall time and host memory.
    console: console for the progress.
    hlo_file: file to keep the optimised HLO in.
  """
  topology = next((text.partition("=")[2] for text in arguments if text.startswith("compile_topology=")), "")
  with console.status(label) as status:
    figures = compare.figures(
        arguments,
        bounds=bounds,
        chip=chips.of_topology(topology),
        hlo_file=hlo_file,
        on_tick=lambda seconds, memory: status.update(f"{label}: {seconds:.0f} s, {memory / limits.GIB:.1f} GiB"),
    )
  for key in ("bytes", "work", "transfers", "overlap"):
    figures.pop(key, None)
  ending = figures.get("failure") or f"compiled in {figures['compile_s']} s"
  ending += f", a step of {figures['projection']['step_s']:.4g} s projected" if "projection" in figures else ""
  line = f"{label}: {ending} ({figures['host_memory_GiB']} GiB of host memory)"
  console.print(line, markup=False, highlight=False, soft_wrap=True)
  return figures


def hlo_file(folder: pathlib.Path | None, *names: str) -> pathlib.Path | None:
  """The file in a folder for the step of these names; None without a folder."""
  return folder / f"{'-'.join(names)}.hlo".replace(", ", "-").replace(" ", "_") if folder else None


def parse(
    parser: argparse.ArgumentParser,
    argv: list[str] | None,
    *,
    output: str,
    impl: list[str],
    minutes: float = 30.0,
    sets: str = "",
) -> argparse.Namespace:
  """Parses the options that all commands that compile train steps have: implementations, limits and output files.

  `sets` is the help of `--flags`, which names sets of XLA flags; without it there is no such option.
  """
  if sets:
    parser.add_argument("--flags", nargs="+", default=[], metavar="NAME", help=sets)
    parser.add_argument("--without", nargs="+", default=[], metavar="FLAG", help="flags of these sets to leave out")
  parser.add_argument("--impl", nargs="+", type=shapes.implementation, default=impl, metavar="NAME")
  parser.add_argument("--minutes", type=float, default=minutes, help="wall time per compilation (default: %(default)s)")
  parser.add_argument("--memory-gib", type=float, default=24.0, help="host memory per compilation (default: %(default)s)")
  parser.add_argument("--hlo", type=pathlib.Path, help="folder to keep the optimised HLO in")
  parser.add_argument("--output", type=pathlib.Path, default=RESULTS / output)
  options = parser.parse_args(argv)
  if sets:
    try:
      flags.joined("", [] if options.flags == [best_flags.BEST] else options.flags, options.without)
    except ValueError as error:
      parser.error(str(error))
  options.limits = limits.Limits(seconds=options.minutes * 60, memory_bytes=int(options.memory_gib * limits.GIB))
  if options.hlo:
    options.hlo.mkdir(parents=True, exist_ok=True)
  return options

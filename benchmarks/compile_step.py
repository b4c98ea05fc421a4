# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Common parts of the commands that compile train steps: their options, and a line of progress for each step."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
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
    names: Sequence[str],
    options: argparse.Namespace,
    console: rich_console.Console,
) -> dict[str, Any]:
  """Compiles in a separate process, with a line of progress; returns the figures, or `failure` with the reason.

  The figures are those of `compare.figures` without `transfers` and `overlap`, and with sizes in GB.

  Args:
    arguments: MaxText's command-line arguments, without the yml file, or with a preset's name in its place.
    label: the text of the line of progress.
    names: of the files in the folder `--hlo`.
    options: what `parse` returns. With `--read` the program is one that has been kept in that folder.
    console: console for the progress.

  Raises:
    ValueError: `--read` and no such program.
  """
  topology = next((text.partition("=")[2] for text in arguments if text.startswith("compile_topology=")), "")
  chip = chips.of_topology(topology)
  program = hlo_file(options.hlo, *names) if options.hlo else None
  kept = program.with_suffix(".json") if program else None
  if options.read and program and kept:
    figures = compare.of_kept(arguments, chip=chip, hlo_file=program, kept_file=kept)
  else:
    with console.status(label) as status:
      figures = compare.figures(
          arguments,
          bounds=options.limits,
          chip=chip,
          hlo_file=program,
          kept_file=kept,
          on_tick=lambda seconds, memory: status.update(f"{label}: {seconds:.0f} s, {memory / limits.GIB:.1f} GiB"),
      )
  for key in ("bytes", "work", "transfers", "overlap"):
    figures.pop(key, None)
  ending = figures.get("failure") or f"compiled in {figures['compile_s']} s"
  ending += f", a step of {figures['projection']['step_s']:.4g} s projected" if "projection" in figures else ""
  line = f"{label}: {ending} ({figures['host_memory_GiB']} GiB of host memory)"
  console.print(line, markup=False, highlight=False, soft_wrap=True)
  return figures


def hlo_file(folder: pathlib.Path, *names: str) -> pathlib.Path:
  """The file in a folder for the step of these names."""
  return folder / f"{'-'.join(names)}.hlo".replace(", ", "-").replace(" ", "_")


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
  read = "read the programs that --hlo has kept, instead of compiling: after a change of rates or of how they are read"
  parser.add_argument("--read", action="store_true", help=read)
  parser.add_argument("--output", type=pathlib.Path, default=RESULTS / output)
  options = parser.parse_args(argv)
  if sets:
    try:
      flags.joined("", [] if options.flags == [best_flags.BEST] else options.flags, options.without)
    except ValueError as error:
      parser.error(str(error))
  options.limits = limits.Limits(seconds=options.minutes * 60, memory_bytes=int(options.memory_gib * limits.GIB))
  if options.read and not options.hlo:
    parser.error("--read needs the folder --hlo")
  if options.hlo:
    options.hlo.mkdir(parents=True, exist_ok=True)
  return options

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Draws a schedule: which stage works on which microbatch when, and which repeats are in the window of weights.

  maxtext-pp draw --stages 4 --microbatches 8 --repeats 2 [--output schedule.svg]
  maxtext-pp draw CONFIG key=value ... [--output schedule.png]

The terminal gets the picture as text; --output writes it as SVG or PNG. Colours are repeats, and bubbles are empty. The
window is that of one stage, as circular_bsw keeps it. A CONFIG with pipeline_impl=circular or circular_ag_once has no
window, and none is drawn.
"""

from __future__ import annotations

import argparse
import pathlib
import shutil
import sys

from maxtext_pp_ext.cli import maxtext, output
from maxtext_pp_ext.cli.errors import CommandError, REFUSALS

_MOST_CELLS = 100_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
  parser.add_argument("--stages", type=int)
  parser.add_argument("--microbatches", type=int, help="(default: as many as stages, times the delay)")
  parser.add_argument("--repeats", type=int, help="(default: 1)")
  parser.add_argument("--delay", type=int, help="2 with pipeline_delay_activation_forwarding (default: 1)")
  parser.add_argument("--stage", type=int, default=0, help="whose window of weights to draw (default: 0)")
  parser.add_argument("--output", type=pathlib.Path, metavar="FILE", help="write a picture: .svg or .png")


def run(args: argparse.Namespace) -> int:
  from maxtext_pp_ext.draw import text  # pylint: disable=import-outside-toplevel

  schedule, residency = _schedule(args)
  if not 0 <= args.stage < schedule.stages:
    raise CommandError(f"--stage {args.stage}: the stages are 0 to {schedule.stages - 1}.")
  if (cells := schedule.stages * schedule.iterations) > _MOST_CELLS:
    raise CommandError(
        f"{schedule.stages} stages × {schedule.iterations} iterations = {cells}: more than can be drawn ({_MOST_CELLS})."
    )
  if args.output is not None:
    _write(schedule, residency, args.output, args.stage)
  if args.json:
    output.print_json(_as_json(schedule, residency, args.stage))
  elif args.output is None:
    color = sys.stdout.isatty()
    width = shutil.get_terminal_size((120, 24)).columns
    for line in text.lines(schedule, stage=args.stage, width=width, color=color, residency=residency):
      print(line)
  return 0


def _schedule(args: argparse.Namespace):
  """Returns (the schedule, how long its pipeline keeps weights)."""
  from maxtext_pp_ext.schedule import CircularSchedule, Residency  # pylint: disable=import-outside-toplevel

  sizes = {"microbatches": args.microbatches, "repeats": args.repeats, "delay": args.delay}
  options = {f"--{name}": size for name, size in ({"stages": args.stages} | sizes).items()}
  maxtext.check_numbers(options, most=_MOST_CELLS)
  try:
    if args.stages is None:
      if not args.maxtext_args or any(size is not None for size in sizes.values()):
        raise CommandError("give --stages with --microbatches and --repeats, or CONFIG key=value ... instead of them")
      return _schedule_of_run(args.maxtext_args)
    if args.maxtext_args:
      raise CommandError("give either --stages or CONFIG key=value ...")
    delay = 1 if args.delay is None else args.delay
    microbatches = delay * args.stages if args.microbatches is None else args.microbatches
    repeats = 1 if args.repeats is None else args.repeats
    return CircularSchedule(stages=args.stages, microbatches=microbatches, repeats=repeats, delay=delay), Residency.REPEAT
  except REFUSALS as error:
    raise CommandError(str(error)) from error


def _schedule_of_run(maxtext_args: list[str]):
  maxtext.check_arguments(maxtext_args)
  maxtext.prepare()
  with output.progress("importing MaxText") as shown, output.quiet():
    from maxtext_pp_ext.host import postponed  # pylint: disable=import-outside-toplevel
    from maxtext_pp_ext.host.models import layouts  # pylint: disable=import-outside-toplevel

    postponed.import_maxtext()
    shown.now("reading the config")
    return layouts.schedule_of_run(maxtext_args), layouts.residency_of_run(maxtext_args)


def _write(schedule, residency, path: pathlib.Path, stage: int) -> None:
  maxtext.check_output("--output", path, (".svg", ".png"))
  from maxtext_pp_ext.draw import picture  # pylint: disable=import-outside-toplevel

  try:
    picture.draw(schedule, path, stage=stage, residency=residency)
  except OSError as error:
    raise CommandError(f"--output {path}: {error}") from error
  print(f"wrote {path}", file=sys.stderr)


def _as_json(schedule, residency, stage: int) -> dict:
  import dataclasses  # pylint: disable=import-outside-toplevel

  from maxtext_pp_ext.schedule import window  # pylint: disable=import-outside-toplevel

  steps = {
      "forward": [_step_as_json(step) for step in window.forward(schedule, stage)],
      "backward": [_step_as_json(step) for step in window.backward(schedule, stage)],
  }
  return dataclasses.asdict(schedule) | {
      "iterations": schedule.iterations,
      "bubble_fraction": schedule.bubble_fraction,
      "stage": stage,
      **(steps if residency.prefetches else {}),
  }


def _step_as_json(step) -> dict:
  import dataclasses  # pylint: disable=import-outside-toplevel

  values = dataclasses.asdict(step)
  # The name in JSON, which programs may rely on.
  return values | {"turns": values.pop("advances")}

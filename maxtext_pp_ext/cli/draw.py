# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Draws a schedule: which stage works on which microbatch when, and which repeats are in the double buffer.

  maxtext-pp draw --stages 4 --microbatches 8 --repeats 2 [--output schedule.svg]
  maxtext-pp draw CONFIG key=value ... [--output schedule.png]

The terminal gets the picture as text; --output writes it as SVG or PNG. Colours are repeats, and bubbles are empty. The
double buffer is that of one stage, as circular_bsw keeps it. A CONFIG with pipeline_impl=circular or circular_ag_once has
none, and none is drawn.
"""

import argparse
import dataclasses
import pathlib
import shutil
import sys
from typing import Any

from maxtext_pp_ext.cli import maxtext, output
from maxtext_pp_ext.cli.errors import CommandError, refusing
from maxtext_pp_ext.draw import text
from maxtext_pp_ext.schedule import CircularSchedule, double_buffer, GatherPolicy, Schedule

_MOST_CELLS = 100_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
  parser.add_argument("--stages", type=int)
  parser.add_argument("--microbatches", type=int, help="(default: as many as stages, times the delay)")
  parser.add_argument("--repeats", type=int, help="(default: 1)")
  parser.add_argument("--delay", type=int, help="2 with pipeline_delay_activation_forwarding (default: 1)")
  parser.add_argument("--stage", type=int, default=0, help="whose double buffer to draw (default: 0)")
  parser.add_argument("--output", type=pathlib.Path, metavar="FILE", help="write a picture: .svg or .png")


def run(args: argparse.Namespace) -> int:
  schedule, gather_policy = _schedule(args)
  if not 0 <= args.stage < schedule.stages:
    raise CommandError(f"--stage {args.stage}: the stages are 0 to {schedule.stages - 1}.")
  if (cells := schedule.stages * schedule.iterations) > _MOST_CELLS:
    raise CommandError(
        f"{schedule.stages} stages × {schedule.iterations} iterations = {cells}: more than can be drawn ({_MOST_CELLS})."
    )
  if args.output is not None:
    maxtext.check_output("--output", args.output, (".svg", ".png"))
    from maxtext_pp_ext.draw import picture  # pylint: disable=import-outside-toplevel

    with refusing(f"--output {args.output}: "):
      picture.draw(schedule, args.output, stage=args.stage, gather_policy=gather_policy)
    print(f"wrote {args.output}", file=sys.stderr)
  if args.json:
    print(output.json_text(_as_json(schedule, gather_policy, args.stage)))
  elif args.output is None:
    color = sys.stdout.isatty()
    width = shutil.get_terminal_size((120, 24)).columns
    print(*text.lines(schedule, stage=args.stage, width=width, color=color, gather_policy=gather_policy), sep="\n")
  return 0


def _schedule(args: argparse.Namespace) -> tuple[Schedule, GatherPolicy | None]:
  """Returns (the schedule, how long its pipeline keeps weights)."""
  sizes = {name: getattr(args, name) for name in ("stages", "microbatches", "repeats", "delay")}
  maxtext.check_numbers({f"--{name}": size for name, size in sizes.items()}, most=_MOST_CELLS)
  given = {name: size for name, size in sizes.items() if size is not None}
  if args.stages is None:
    if given or not args.maxtext_args:
      raise CommandError("give --stages with --microbatches and --repeats, or CONFIG key=value ... instead of them")
    maxtext.check_arguments(args.maxtext_args)
    with maxtext.imported("reading the config"):
      from maxtext_pp_ext.host.models import layouts  # pylint: disable=import-outside-toplevel

      return layouts.schedule_of_run(args.maxtext_args), layouts.gather_policy_of_run(args.maxtext_args)
  if args.maxtext_args:
    raise CommandError("give either --stages or CONFIG key=value ...")
  fewest = {"microbatches": given.get("delay", 1) * args.stages, "repeats": 1}
  with refusing():
    return CircularSchedule(**fewest | given), GatherPolicy.REPEAT


def _as_json(schedule: Schedule, gather_policy: GatherPolicy | None, stage: int) -> dict[str, Any]:
  found = dataclasses.asdict(schedule)
  found |= {"iterations": schedule.iterations, "bubble_fraction": schedule.bubble_fraction, "stage": stage}
  if gather_policy and gather_policy.prefetches:
    for direction in (double_buffer.forward, double_buffer.backward):
      steps = map(dataclasses.asdict, direction(schedule, stage))
      # "turns" is the name in JSON, which programs may rely on.
      found[direction.__name__] = [step | {"turns": step.pop("advances")} for step in steps]
  return found

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Looks at this environment, and says what is wrong with it and what to do.

  maxtext-pp doctor [--json]
  maxtext-pp doctor --source FOLDER [--json]

It shows the versions of everything that matters, whether the start-up hook is there, which parts of MaxText are replaced
and which look different from what this package knows, the implementations of pipelines, those of other packages too, the
devices, and the environment variables that change what a run does. --json prints it for a report. The exit code is 1 if
something is wrong, else 0.

--source looks at a MaxText that is not installed instead: whether its source, in FOLDER, still has what this package
replaces and imports. It is read, and not run.
"""

import argparse
import dataclasses
import functools
import itertools
import operator
import os
from typing import Any

from maxtext_pp_ext.cli import output
from maxtext_pp_ext.cli.errors import CommandError, FAILED, refusing
from maxtext_pp_ext.compiled import child, limits
from maxtext_pp_ext.host import doctor

_BOUNDS = limits.Limits(seconds=120.0, memory_bytes=8 << 30)
_MARKS = {doctor.FINE: " ", doctor.NOTE: "-", doctor.WRONG: "!"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
  parser.add_argument("--no-devices", action="store_true", help="do not ask for devices, which a run may be using")
  parser.add_argument("--source", metavar="FOLDER", help="judge the source of a MaxText that is not installed")


def run(args: argparse.Namespace) -> int:
  if args.maxtext_args:
    raise CommandError("doctor looks at the environment; maxtext-pp check looks at a config.")
  if args.source is not None:
    from maxtext_pp_ext.host import source_check  # pylint: disable=import-outside-toplevel

    with refusing():
      found = source_check.findings(args.source)
  else:
    platforms = os.environ.get("JAX_PLATFORMS")  # as it is before MaxText is imported
    with output.progress("importing MaxText"), output.quiet():
      found = doctor.findings()
      if not args.no_devices:
        found.append(doctor.of_devices(child.Machine(platforms).devices(_BOUNDS)))
  wrong = sum(each.state == doctor.WRONG for each in found)
  result = {"findings": [dataclasses.asdict(each) for each in found], "wrong": wrong}
  output.print_result(result, args.json, functools.partial(_print, found))
  return FAILED if wrong else 0


def _print(found: list[Any], result: dict[str, Any]) -> None:
  width = max(len(each.name) for each in found)
  for subject, of_subject in itertools.groupby(found, key=operator.attrgetter("subject")):
    print(subject)
    for each in of_subject:
      print(f"{_MARKS[each.state]} {each.name:<{width}}  {each.value}")
      if each.advice:
        print(f"  {'':<{width}}  -> {each.advice}")
  notes = sum(each.state == doctor.NOTE for each in found)
  wrong = f"{result['wrong']} wrong" if result["wrong"] else "nothing is wrong"
  print(wrong + (f"; - marks {notes} more to know" if notes else ""))

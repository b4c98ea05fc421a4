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

from __future__ import annotations

import argparse
import dataclasses
import os
from typing import Any

from maxtext_pp_ext.cli import output
from maxtext_pp_ext.cli.errors import CommandError, FAILED
from maxtext_pp_ext.errors import SetupError

_GIB = 1 << 30
_SECONDS = 120.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
  parser.add_argument("--no-devices", action="store_true", help="do not ask for devices, which a run may be using")
  parser.add_argument("--source", metavar="FOLDER", help="judge the source of a MaxText that is not installed")


def run(args: argparse.Namespace) -> int:
  from maxtext_pp_ext.host import doctor  # pylint: disable=import-outside-toplevel

  if args.maxtext_args:
    raise CommandError("doctor looks at the environment; maxtext-pp check looks at a config.")
  found = _of_source(args.source) if args.source is not None else _of_environment(args.no_devices)
  wrong = [each for each in found if each.state == doctor.WRONG]
  if args.json:
    output.print_json({"findings": [dataclasses.asdict(each) for each in found], "wrong": len(wrong)})
  else:
    _print(found)
    notes = sum(each.state == doctor.NOTE for each in found)
    print((f"{len(wrong)} wrong" if wrong else "nothing is wrong") + (f"; - marks {notes} more to know" if notes else ""))
  return FAILED if wrong else 0


def _of_source(folder: str) -> list[Any]:
  from maxtext_pp_ext.host import source_check  # pylint: disable=import-outside-toplevel

  try:
    return source_check.findings(folder)
  except (SetupError, OSError, ValueError) as error:
    raise CommandError(str(error)) from error


def _of_environment(no_devices: bool) -> list[Any]:
  from maxtext_pp_ext.host import doctor  # pylint: disable=import-outside-toplevel

  platforms = os.environ.get("JAX_PLATFORMS")
  with output.progress("importing MaxText"), output.quiet():
    found = doctor.findings()
    if not no_devices:
      found.append(doctor.of_devices(_machine(platforms)))
  return found


def _machine(platforms: str | None) -> dict[str, Any]:
  from maxtext_pp_ext.compiled import child, limits  # pylint: disable=import-outside-toplevel
  from maxtext_pp_ext.compiled.measured import devices  # pylint: disable=import-outside-toplevel

  return devices.of_machine(child.Machine(platforms), limits.Limits(seconds=_SECONDS, memory_bytes=8 * _GIB))


def _print(found: list[Any]) -> None:
  subject = None
  width = max(len(each.name) for each in found)
  for each in found:
    if each.subject != subject:
      subject = each.subject
      print(subject)
    mark = {"ok": " ", "note": "-", "wrong": "!"}[each.state]
    print(f"{mark} {each.name:<{width}}  {each.value}")
    if each.advice:
      print(f"  {'':<{width}}  -> {each.advice}")

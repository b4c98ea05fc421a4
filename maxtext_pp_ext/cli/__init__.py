# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""`maxtext-pp`: tools for pipelines, one subcommand per file.

A subcommand is a module of this package with `add_arguments(parser)` and `run(args) -> exit code`. `run` imports what it
needs, so help is instant. Every subcommand has MaxText's arguments in `args.maxtext_args`, and `args.json`, which asks
for output for programs.
"""

import argparse
from collections.abc import Sequence
import functools
import importlib
import os
import sys
from typing import Any

import maxtext_pp_ext
from maxtext_pp_ext import installed
from maxtext_pp_ext.cli import completion
from maxtext_pp_ext.cli.errors import CommandError, FAILED, UNUSABLE
from maxtext_pp_ext.errors import SetupError
from maxtext_pp_ext.nearest import did_you_mean
from maxtext_pp_ext.processes import interruption

# name: what it is for. The module has the same name.
SUBCOMMANDS = {
    "check": "list all problems of a config, and its layout, schedule and memory, without compiling",
    "compare": "one run's train step compiled with several pipelines: memory, traffic, step times",
    "convert": "rewrite a checkpoint in the layout of another pipeline, or of none",
    "doctor": "look at this environment: versions, patch points, devices; say what is wrong and what to do",
    "draw": "draw a schedule: which stage works on what when",
    "plan": "rank the possible pipelines of a model on a topology by their costs",
    "sharding": "show how each parameter is sharded, and by which rule",
}

_UNREAD = 128 + 13  # as if ended by SIGPIPE, which is the rule for commands

_EPILOG = f"""exit codes:
  0  done
  {FAILED}  tried, and failed
  {UNUSABLE}  arguments, configuration or files that cannot work; nothing was done
  128 + N  ended by signal N: 129 SIGHUP, 130 SIGINT (Ctrl-C), 141 SIGPIPE, 143 SIGTERM
"""


def main(argv: Sequence[str] | None = None) -> int:
  """Runs one subcommand and returns the exit code."""
  argv = list(sys.argv[1:] if argv is None else argv)
  for stream in (sys.stdout, sys.stderr):  # arguments may be text that cannot be printed
    if hasattr(stream, "reconfigure"):
      stream.reconfigure(errors="backslashreplace")
  if "_ARGCOMPLETE" in os.environ:  # a shell has started this process to complete a command line
    completion.complete(_of_all_subcommands())
  if not argv or argv[0] not in SUBCOMMANDS:
    return _without_subcommand(argv)
  module = importlib.import_module(f"{__name__}.{argv[0]}")
  parser = _parser(argv[0], description=module.__doc__)
  _add_arguments(parser, module)
  # Intermixed: options may stand between MaxText's arguments.
  args, unknown = parser.parse_known_intermixed_args(argv[1:])
  if unknown:
    options = [argument for argument in unknown if argument.startswith("-")]  # the others may be their values
    parser.error("; ".join(_unknown(parser, argument) for argument in options or unknown))
  args.given = argv[1:]
  return interruption.run(functools.partial(_run, module, args), "maxtext-pp")


def _parser(subcommand: str = "", **texts: str | None) -> argparse.ArgumentParser:
  return argparse.ArgumentParser(
      prog=f"maxtext-pp {subcommand}".rstrip(),
      epilog=_EPILOG,
      formatter_class=argparse.RawDescriptionHelpFormatter,
      allow_abbrev=False,
      **texts,  # type: ignore[arg-type]  # of arguments that are texts
  )


def _of_all_subcommands() -> argparse.ArgumentParser:
  parser = _parser()
  parser.add_argument("--version", action="store_true")
  subcommands = parser.add_subparsers()
  for name, text in SUBCOMMANDS.items():
    module = importlib.import_module(f"{__name__}.{name}")
    _add_arguments(subcommands.add_parser(name, help=text, allow_abbrev=False), module)
  return parser


def _unknown(parser: argparse.ArgumentParser, argument: str) -> str:
  name, equals, _ = argument.partition("=")
  options = [option for action in parser._actions for option in action.option_strings]  # pylint: disable=protected-access
  meant = did_you_mean(name, options)
  if meant == "." and equals and argument.startswith("-"):
    meant = f"; if it is a key of MaxText's, write {argument.lstrip('-')}"
  return f"{name} is no option of {parser.prog}{meant.removesuffix('.')}"


def _run(module: Any, args: argparse.Namespace) -> int:
  try:
    code = module.run(args) or 0
    sys.stdout.flush()
    return code
  except BrokenPipeError:
    # Who read the output has enough, as `head` has. Python would complain again when it flushes at the end.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return _UNREAD
  except (CommandError, SetupError) as error:
    print(f"maxtext-pp: {error}", file=sys.stderr)
    return error.code if isinstance(error, CommandError) else UNUSABLE
  except ModuleNotFoundError as error:
    if error.name is None or error.name.split(".")[0] == "maxtext_pp_ext":
      raise
    print(
        f"maxtext-pp: {error.name} is not installed. Tables and pictures need the extra tools, MaxText on a machine "
        f"without accelerators the extra cpu: {installed.HOW}.",
        file=sys.stderr,
    )
    return UNUSABLE


def _without_subcommand(argv: Sequence[str]) -> int:
  width = max(map(len, SUBCOMMANDS))
  commands = "\n".join(f"  {name:<{width}}  {text}" for name, text in SUBCOMMANDS.items())
  parser = _parser(
      usage="maxtext-pp SUBCOMMAND [--help] ...",
      description="Checks, plans, compares and draws pipelines of MaxText, and converts their checkpoints.\n\n"
      f"subcommands:\n{commands}",
  )
  parser.add_argument("--version", action="version", version=f"maxtext-pp-ext {maxtext_pp_ext.__version__}")
  parser.add_argument("subcommand", nargs="?", help=argparse.SUPPRESS)
  if (name := parser.parse_known_args(argv)[0].subcommand or next(iter(argv), None)) is None:
    parser.print_help()
    return 0
  parser.error(f"no subcommand {name!r}: choose from {', '.join(SUBCOMMANDS)}{did_you_mean(name, SUBCOMMANDS)}")


def _add_arguments(parser: argparse.ArgumentParser, module: Any) -> None:
  module.add_arguments(parser)
  of_maxtext = "the arguments of a run of MaxText: a yml file, then keys"
  parser.add_argument("maxtext_args", nargs="*", metavar="CONFIG key=value", help=of_maxtext)
  parser.add_argument("--json", action="store_true", help="print JSON, for programs")

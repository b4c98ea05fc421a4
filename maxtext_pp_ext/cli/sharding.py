# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Shows how each parameter of a MaxText config is sharded, and why; first those whose replication costs most.

  maxtext-pp sharding CONFIG key=value ... [--picture PARAMETER]

For each parameter it shows memory per device, the number of devices that hold the same part, and the dimensions that are
sharded, with their mesh axes. --verbose adds shape, dtype, and for each dimension the rule that bound it, and the rules
passed over, with the reason. --conflicts shows conflicts only. Conflicts are no failure. No devices are needed: they are
those of compile_topology, of --devices, or as many as the parallelism makes.
"""

import argparse
from collections.abc import Iterator, Sequence
import shutil
import textwrap
from typing import Any

from maxtext_pp_ext import units
from maxtext_pp_ext.cli import maxtext, output
from maxtext_pp_ext.cli.errors import CommandError
from maxtext_pp_ext.host.models import run_config
from maxtext_pp_ext.host.rules import problems
from maxtext_pp_ext.nearest import nearest

_WIDTH = 160  # without a terminal
_BEFORE_PATH = 22  # columns of a line


def add_arguments(parser: argparse.ArgumentParser) -> None:
  parser.add_argument("--devices", type=int, metavar="N", help="how many devices the run is for")
  parser.add_argument("--limit", type=int, metavar="N", help="show the first N parameters only")
  parser.add_argument("--conflicts", action="store_true", help="show what cannot be sharded as the rules say, only")
  parser.add_argument("--verbose", action="store_true", help="show shapes, and the rule of each dimension")
  parser.add_argument(
      "--picture",
      metavar="PARAMETER",
      help="draw which device holds which part of a parameter, given the end of its path",
  )


def run(args: argparse.Namespace) -> int:
  maxtext.check_numbers({"--devices": args.devices}, most=run_config.MOST_DEVICES)
  maxtext.check_numbers({"--limit": args.limit})
  if args.picture is not None and args.json:
    raise CommandError("--picture is text, and --json is for programs: give one of them.")
  maxtext.check_given(args.maxtext_args)
  maxtext.check_arguments(args.maxtext_args)
  with maxtext.imported("building MaxText's model without arrays"):
    from maxtext_pp_ext.host.models import abstract_model  # pylint: disable=import-outside-toplevel

    given = run_config.given_keys(args.maxtext_args)
    config = run_config.read_without_run(args.maxtext_args, **run_config.of_absent_devices(given, args.devices))
    problems.refuse_mesh(config, given)
    explanation = abstract_model.explained(config)[0]
  if args.picture is not None:
    _picture(explanation, args.picture)
  elif args.json:
    found = explanation.to_dict()
    print(output.json_text(found | {"parameters": found["parameters"][: args.limit]}))
  else:
    _print(explanation, args)
  return 0


def _picture(explanation: Any, name: str) -> None:
  from maxtext_pp_ext import sharding  # pylint: disable=import-outside-toplevel

  paths = [row.layout.path for row in explanation.rows]
  found = [path for path in paths if path == name] or [path for path in paths if path.endswith(name)]
  if len(found) > 1:
    count = len(found)
    raise CommandError(f"--picture {name}: {count} parameters have a path that ends so; take one of\n{_lines(found)}")
  if not found:
    raise CommandError(f"--picture {name}: no parameter has a path that ends so; {_alike(name, paths)}")
  layout = explanation[found[0]].layout
  print(layout.path)
  print(sharding.picture(layout.shape, layout.sharding))


def _alike(name: str, paths: Sequence[str]) -> str:
  """The end of a sentence: the paths that have a name elsewhere, else those whose ends are like it, else all."""
  if has_it := [path for path in paths if name and name in path]:
    return f"these have it elsewhere:\n{_lines(has_it)}"
  ends = {"/".join(path.split("/")[-1 - name.count("/") :]): path for path in paths}
  if like_it := [path for end in nearest(name, ends, 5) for path in paths if path.endswith(end)]:
    return f"these end in something like it:\n{_lines(like_it)}"
  return f"take one of\n{_lines(paths)}"


def _lines(paths: Sequence[str]) -> str:
  return "\n".join(f"  {path}" for path in paths)


def _print(explanation: Any, args: argparse.Namespace) -> None:
  from maxtext_pp_ext.sharding.conflicts import conflicts_text  # pylint: disable=import-outside-toplevel
  from maxtext_pp_ext.sharding.explain import mesh_text, totals_text  # pylint: disable=import-outside-toplevel

  width = shutil.get_terminal_size((_WIDTH, 24)).columns
  lines = [mesh_text(explanation.mesh_shape)]
  if not args.conflicts:
    rows = explanation.rows[: args.limit]
    lines += [line for row in rows for line in row.lines] if args.verbose else _short(rows, width)
    if args.limit is not None and args.limit < len(explanation.rows):
      lines.append(f"{len(explanation.rows) - args.limit} more, without --limit")
    lines.append(totals_text(explanation.totals))
  if explanation.conflicts:
    lines += conflicts_text(explanation.conflicts).splitlines()
  elif args.conflicts:
    lines.append("no sharding conflicts")
  for line in lines:
    indent = " " * (len(line) - len(line.lstrip()))
    # Of a path no part goes to the next line.
    filled = textwrap.fill(line, width, subsequent_indent=f"{indent}    ", break_long_words=False, break_on_hyphens=False)
    print(filled if len(line) > width else line)


def _short(rows: Sequence[Any], width: int) -> Iterator[str]:
  """Yields a line per parameter, no wider than `width` if its path can be short enough."""
  from maxtext_pp_ext.sharding.explain import axes_text  # pylint: disable=import-outside-toplevel

  marks = " (!: a conflict)" if any(row.layout.conflicts for row in rows) else ""
  yield f"per device  copies    parameter{marks}, mesh axes of each dimension"
  shown = [(row, axes_text(row.layout)) for row in rows]
  room = width - _BEFORE_PATH - 2 - max((len(text) for _, text in shown), default=0)
  paths = [_shortened(row.layout.path, room) for row in rows]
  column = max(map(len, paths), default=0)
  for (row, text), path in zip(shown, paths, strict=True):
    mark = "!" if row.layout.conflicts else " "
    yield f"{units.bytes_text(row.bytes_per_device):>10}  {row.replication:>6}  {mark} {path:<{column}}  {text}"


def _shortened(path: str, room: int) -> str:
  """Returns a path without parts of its middle, if it is too long. Parts stay whole, and the last one stays."""
  parts = path.split("/")
  shorter = [
      "/".join((*parts[:first], "…", *parts[-last:])) for first in (2, 1, 0) for last in range(1, len(parts) - first)
  ]
  fitting = [text for text in (path, *shorter) if len(text) <= room]
  return max(fitting, key=len) if fitting else f"…/{parts[-1]}"

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Shows how each parameter of a MaxText config is sharded, and why; first those whose replication costs most.

  maxtext-pp sharding CONFIG key=value ... [--picture PARAMETER]

For each parameter it shows shape, logical axes, sharding and memory per device; for each dimension the rule that bound
it, and the rules passed over, with the reason. compile_topology=... chooses the devices, as for MaxText's train_compile;
they need not be present. Conflicts are shown, but are not a failure.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any, TextIO

from maxtext_pp_ext import units
from maxtext_pp_ext.cli import maxtext, output
from maxtext_pp_ext.cli.errors import CommandError, REFUSALS


def add_arguments(parser: argparse.ArgumentParser) -> None:
  parser.add_argument("--limit", type=int, metavar="N", help="show the first N parameters only")
  parser.add_argument(
      "--picture",
      metavar="PARAMETER",
      help="draw which device holds which part of a parameter, given the end of its path",
  )


def run(args: argparse.Namespace) -> int:
  maxtext.check_arguments(args.maxtext_args)
  maxtext.check_numbers({"--limit": args.limit})
  maxtext.prepare()
  try:
    with output.progress("building MaxText's model without arrays"), output.quiet():
      explanation = _explain(args.maxtext_args)
  except REFUSALS as error:  # a config or a mesh that cannot be
    raise CommandError(str(error)) from error
  if args.picture is not None:
    _picture(explanation, args.picture)
  elif args.json:
    output.print_json(_limited(explanation.to_dict(), args.limit))
  else:
    _table(explanation, args.limit, sys.stdout)
  return 0


def _explain(maxtext_args: list[str]) -> Any:
  from maxtext_pp_ext.host.models import abstract_model, run_config  # pylint: disable=import-outside-toplevel

  return abstract_model.explained(run_config.read_without_run(maxtext_args))[0]


def _limited(found: dict[str, Any], limit: int | None) -> dict[str, Any]:
  return found if limit is None else found | {"parameters": found["parameters"][:limit]}


def _picture(explanation: Any, name: str) -> None:
  from maxtext_pp_ext import sharding  # pylint: disable=import-outside-toplevel

  paths = [row.layout.path for row in explanation.rows]
  found = [path for path in paths if path == name] or [path for path in paths if path.endswith(name)]
  if len(found) != 1:
    listed = "\n".join(found or paths)
    raise CommandError(f"--picture {name}: {len(found)} parameters have a path that ends so; take one of\n{listed}")
  layout = explanation[found[0]].layout
  print(layout.path)
  print(sharding.picture(layout.shape, layout.sharding))


def _table(explanation: Any, limit: int | None, file: TextIO) -> None:
  # pylint: disable=import-outside-toplevel
  from rich import box, console, table, text

  from maxtext_pp_ext.sharding.conflicts import conflicts_text
  from maxtext_pp_ext.sharding.explain import dimension_lines, mesh_text, spec_text, totals_text

  # pylint: enable=import-outside-toplevel

  # Text, not str: square brackets of shapes are no markup.
  output = console.Console(file=file, width=None if file.isatty() else 160, highlight=False)
  output.print(text.Text(mesh_text(explanation.mesh_shape)))
  shown = table.Table(box=box.HORIZONTALS, show_lines=True)
  for title, is_number in (("parameter", False), ("dimensions", False), ("per device", True), ("replicas", True)):
    shown.add_column(title, justify="right" if is_number else "left", overflow="fold")
  for row in explanation.rows[:limit]:
    layout = row.layout
    dimensions = list(dimension_lines(layout)) or ["no annotation"]
    dimensions += [f"! {conflict.kind.value}" for conflict in layout.conflicts]
    name = f"{layout.path}\n{layout.dtype}{list(layout.shape)}\n{spec_text(layout.sharding.spec)}"
    cells = (name, "\n".join(dimensions), units.bytes_text(row.bytes_per_device), str(row.replication))
    shown.add_row(*map(text.Text, cells))
  output.print(shown)
  if limit is not None and limit < len(explanation.rows):
    output.print(text.Text(f"{len(explanation.rows) - limit} more, without --limit"))
  output.print(text.Text(totals_text(explanation.totals)))
  if explanation.conflicts:
    output.print(text.Text(conflicts_text(explanation.conflicts)))

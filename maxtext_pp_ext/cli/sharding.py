# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""`maxtext-pp sharding CONFIG key=value …`: how a config's parameters are sharded, without devices or weights."""

import argparse
import contextlib
import json
import sys
from typing import Any, TextIO


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """The options; MaxText's own arguments are the parser's `maxtext_args`."""
  parser.description = (
      "Shows, for each parameter of a MaxText config, its shape, logical axes and sharding, the rule that bound each"
      " dimension and those passed over and why, and what it takes on each device; first those whose replication costs"
      " most. compile_topology=… chooses the devices, as for MaxText's train_compile; none need be there."
  )
  parser.add_argument("--json", action="store_true", help="print JSON")
  parser.add_argument("--limit", type=int, metavar="N", help="show the first N parameters only")
  parser.add_argument(
      "--picture",
      metavar="PARAMETER",
      help="draw which device holds which part of a parameter, given the end of its path",
  )


def run(args: argparse.Namespace) -> int:
  """Prints the shardings.

  Returns:
    0, or 2 if the arguments are no config, or name no parameter; conflicts are shown, and are no failure.
  """
  # What MaxText prints while it reads a config is no part of the answer.
  with contextlib.redirect_stdout(sys.stderr):
    try:
      explanation = _explain(args.maxtext_args)
    except ValueError as error:  # a config or a mesh that cannot be
      print(f"maxtext-pp sharding: {error}", file=sys.stderr)
      return 2
  if args.picture is not None:
    return _picture(explanation, args.picture)
  if args.json:
    print(json.dumps(_limited(explanation.to_dict(), args.limit), indent=2))
  else:
    _table(explanation, args.limit, sys.stdout)
  return 0


def _explain(maxtext_args: list[str]) -> Any:
  # Heavy imports are in functions: `maxtext-pp --help` does not need JAX.
  from flax import nnx  # pylint: disable=import-outside-toplevel
  import maxtext_pp_ext  # pylint: disable=import-outside-toplevel
  from maxtext_pp_ext import sharding  # pylint: disable=import-outside-toplevel
  from maxtext_pp_ext.host import abstract_model, sharding_conflicts  # pylint: disable=import-outside-toplevel

  maxtext_pp_ext.install()
  config = abstract_model.read_config(maxtext_args)
  mesh = abstract_model.abstract_mesh(config)
  parameters, _ = nnx.split_state(abstract_model.abstract_model(config, mesh), nnx.Param, ...)
  return sharding.explain(parameters, mesh, sharding_conflicts.rules_in_play(config.logical_axis_rules))


def _limited(found: dict[str, Any], limit: int | None) -> dict[str, Any]:
  return found if limit is None else found | {"parameters": found["parameters"][:limit]}


def _picture(explanation: Any, name: str) -> int:
  from maxtext_pp_ext import sharding  # pylint: disable=import-outside-toplevel

  paths = [row.layout.path for row in explanation.rows]
  found = [path for path in paths if path == name] or [path for path in paths if path.endswith(name)]
  if len(found) != 1:
    print(f"--picture {name}: {len(found)} parameters have a path that ends so; take one of", file=sys.stderr)
    print("\n".join(found or paths), file=sys.stderr)
    return 2
  layout = explanation[found[0]].layout
  print(layout.path)
  print(sharding.picture(layout.shape, layout.sharding))
  return 0


def _table(explanation: Any, limit: int | None, file: TextIO) -> None:
  # pylint: disable=import-outside-toplevel
  from maxtext_pp_ext.sharding.conflicts import conflicts_text
  from maxtext_pp_ext.sharding.explain import bytes_text, dimension_lines, mesh_text, spec_text, totals_text
  from rich import box, console, table, text

  # pylint: enable=import-outside-toplevel

  # Text, not str: square brackets of shapes are no markup.
  output = console.Console(file=file, width=None if file.isatty() else 160, highlight=False)
  output.print(text.Text(mesh_text(explanation.mesh_shape)))
  shown = table.Table(box=box.HORIZONTALS, show_lines=True)
  for title, justify in (("parameter", "left"), ("dimensions", "left"), ("per device", "right"), ("replicas", "right")):
    shown.add_column(title, justify=justify, overflow="fold")
  for row in explanation.rows[:limit]:
    layout = row.layout
    dimensions = list(dimension_lines(layout)) or ["no annotation"]
    dimensions += [f"! {conflict.kind.value}" for conflict in layout.conflicts]
    name = f"{layout.path}\n{layout.dtype}{list(layout.shape)}\n{spec_text(layout.sharding.spec)}"
    cells = (name, "\n".join(dimensions), bytes_text(row.bytes_per_device), str(row.replication))
    shown.add_row(*map(text.Text, cells))
  output.print(shown)
  if limit is not None and limit < len(explanation.rows):
    output.print(text.Text(f"{len(explanation.rows) - limit} more, without --limit"))
  output.print(text.Text(totals_text(explanation.totals)))
  if explanation.conflicts:
    output.print(text.Text(conflicts_text(explanation.conflicts)))

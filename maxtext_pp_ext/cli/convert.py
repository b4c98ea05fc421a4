# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Rewrites a checkpoint of MaxText in the layout of another pipeline, or of none.

  maxtext-pp convert SRC DST CONFIG key=value ...

CONFIG and keys are those of the run that is to load DST. The layout of SRC, with or without a pipeline, is inferred from
its arrays. They have to be all that MaxText saves of a run in that layout, and no more. --from gives keys of the run
that wrote SRC that cannot be inferred, such as its optimizer. Parameters, optimizer state, biases of experts and scales
of fp8 are carried over, bit by bit. Arrays of no layer pass unchanged. SRC is not touched, and nothing that exists at DST
is overwritten. The new checkpoint appears when it is complete and has been read back. No accelerators are needed, and
memory for a few chunks of one parameter.

SRC is a checkpoint (.../checkpoints/100, with or without /items) or a run's checkpoints folder, of which the last
checkpoint is taken (--step: another). DST is the same kind of folder.
"""

import argparse
import pathlib
from typing import Any

from maxtext_pp_ext import units
from maxtext_pp_ext.checkpoint import complete, places
from maxtext_pp_ext.cli import maxtext, output
from maxtext_pp_ext.cli.errors import CommandError, FAILED, REFUSALS, refusing


def add_arguments(parser: argparse.ArgumentParser) -> None:
  parser.usage = "maxtext-pp convert SRC DST CONFIG key=value ... [--step STEP] [--from key=value] [--dry-run] [--json]"
  parser.add_argument("source", metavar="SRC", help="checkpoint, or folder of checkpoints")
  parser.add_argument("destination", metavar="DST", help="folder to write into; no checkpoint in it is overwritten")
  parser.add_argument("--step", type=int, help="which checkpoint of a folder (default: the last)")
  parser.add_argument(
      "--from",
      dest="source_keys",
      metavar="key=value",
      action="append",
      default=[],
      help="a key with another value in the run that wrote SRC, such as opt_type=adamw; may be repeated",
  )
  parser.add_argument("--dry-run", action="store_true", help="say what would be done, and do nothing")


def run(args: argparse.Namespace) -> int:
  with refusing():
    source, destination = places.source_and_destination(args.source, args.destination, args.step)
  if not args.maxtext_args:
    raise CommandError("Which run is to load DST? Give its CONFIG or key=value after SRC and DST.")
  maxtext.check_arguments(args.maxtext_args)
  maxtext.prepare()
  given = _keys(args.source_keys)
  with output.working("reading the checkpoint, building MaxText's model without arrays"):
    opened, config, old, new = _layouts(source, args.maxtext_args, given)
  result = {
      "source": str(source),
      "destination": str(destination),
      "from": old.description,
      "to": new.description,
      "optimizer_state": complete.has_optimizer(opened.shapes),
  }
  if not args.dry_run:
    result |= _convert(opened, destination, old, new, config)
  output.print_result(result, args.json, _print)
  return 0


def _keys(assignments: list[str]) -> dict[str, object]:
  import yaml  # pylint: disable=import-outside-toplevel

  if wrong := [text for text in assignments if "=" not in text]:
    raise CommandError(f"--from {wrong[0]}: not key=value, such as opt_type=adamw")
  if unknown := assignments and maxtext.problems(assignments):
    raise CommandError("\n".join(f"--from: {each}" for each in unknown))
  try:
    return {key: yaml.safe_load(value) for key, value in (text.split("=", 1) for text in assignments)}
  except yaml.YAMLError as error:
    raise CommandError(f"--from: {error}") from error


def _layouts(source: pathlib.Path, maxtext_args: list[str], given: dict[str, object]):
  """Returns (the opened checkpoint, the config of the run that is to load DST, the old layout, the new layout)."""
  from maxtext_pp_ext.checkpoint import convert, files  # pylint: disable=import-outside-toplevel
  from maxtext_pp_ext.host.models import checkpoints, layouts, run_config  # pylint: disable=import-outside-toplevel

  opened = files.open_checkpoint(source)
  config = layouts.config_of_layout(maxtext_args)
  new = layouts.of_config(config)
  old_config, old = layouts.of_checkpoint(
      maxtext_args,
      opened.shapes,
      scan_layers=opened.scan_layers,
      given={key: value for key, value in given.items() if key not in checkpoints.OF_OPTIMIZER},
      wanted=new,
  )
  if convert.is_same(opened, old, new) and old_config.scan_layers == config.scan_layers:
    raise ValueError(f"{source} already has the layout that these arguments ask for: {new.description}.")
  convert.check_dtypes(opened, old, new)
  old_state = checkpoints.train_state(old_config, run_config.given_keys(maxtext_args) | given)
  complete.check(opened.shapes, checkpoints.by_state(old_state))
  return opened, config, old, new


def _convert(opened, destination: pathlib.Path, old, new, config) -> dict[str, object]:
  from absl import logging  # pylint: disable=import-outside-toplevel

  from maxtext_pp_ext.checkpoint import convert  # pylint: disable=import-outside-toplevel

  logging.set_verbosity(logging.ERROR)  # Orbax's
  convert.hold_no_freed_memory()
  with output.progress("converting") as shown:

    def on_bytes(phase: str, done: int, total: int) -> None:
      # Writing and reading back are each half of the way.
      shown.done, shown.total = done + (total if phase == "verifying" else 0), 2 * total

    try:
      report = convert.convert(opened, destination, old, new, scan_layers=config.scan_layers, on_bytes=on_bytes)
    except FileExistsError as error:
      raise CommandError(str(error)) from error
    except (convert.VerificationError, *REFUSALS) as error:
      raise CommandError(f"{error} Nothing is left at {destination}.", FAILED) from error
  return {
      "arrays": report.arrays,
      "bytes": report.nbytes,
      "verified": True,
      "checksums": {"layers": list(report.layers), "rest": report.rest},
      "drawn_anew": list(report.dropped),
  }


def _print(result: dict[str, Any]) -> None:
  print(f"from  {result['source']}\n      {result['from']}")
  print(f"to    {result['destination']}\n      {result['to']}")
  if not result["optimizer_state"]:
    print("SRC has weights only, and no state of an optimizer.")
  if "arrays" not in result:
    print("Nothing was written (--dry-run).")
    return
  layers = len(result["checksums"]["layers"])
  print(
      f"{result['arrays']} arrays, {units.bytes_text(result['bytes'])}; {layers} layers and all else read back from "
      "disk, checksums agree."
  )
  if result["drawn_anew"]:
    print(f"Random state that has no place in the new model, which draws its own: {', '.join(result['drawn_anew'])}")

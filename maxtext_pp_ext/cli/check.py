# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Lists all problems of a run's config, and shows its layout, schedule and estimated costs, without compiling it.

  maxtext-pp check my.yml ici_pipeline_parallelism=4 pipeline_impl=circular_bsw

It lists all mistyped names, or else all errors about pipelines and the first of MaxText's own. Then it shows which layer
runs on which stage in which repeat, the schedule, and estimates of a device's memory and traffic (docs/how-it-works.md
has the formulas), with what they leave out, and whether it fits into the memory of compile_topology's devices. No devices
are needed: the check is for those of compile_topology, of --devices, or as many as the parallelism makes. The exit code
is 2 if there is an error, else 0, also with warnings.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from maxtext_pp_ext import units
from maxtext_pp_ext.cli import maxtext, output
from maxtext_pp_ext.cli.errors import CommandError, REFUSALS, UNUSABLE
from maxtext_pp_ext.cli.tables import labels
from maxtext_pp_ext.host import postponed
from maxtext_pp_ext.host.models import refusals


def add_arguments(parser: argparse.ArgumentParser) -> None:
  parser.add_argument("--devices", type=int, metavar="N", help="how many devices the run is for")


def run(args: argparse.Namespace) -> int:
  maxtext.check_numbers({"--devices": args.devices}, most=refusals.MOST_DEVICES)
  if problems := maxtext.problems(args.maxtext_args):
    _show(args, {"errors": problems, "warnings": [], "devices": None})
    return UNUSABLE
  maxtext.prepare()
  try:
    with output.progress("importing MaxText") as shown, output.quiet():
      postponed.import_maxtext()
      from maxtext_pp_ext.plan import check  # pylint: disable=import-outside-toplevel

      shown.now("reading the config, building MaxText's model without arrays")
      found = check.check(args.maxtext_args, args.devices)
  except REFUSALS as error:
    raise CommandError(str(error)) from error
  _show(args, _result(found))
  return UNUSABLE if found.errors else 0


def _show(args: argparse.Namespace, result: dict[str, Any]) -> None:
  if args.json:
    output.print_json(result)
  else:
    _print(result)


def _result(found: Any) -> dict[str, Any]:
  result = {"errors": found.errors, "warnings": found.warnings, "devices": found.devices}
  if found.layout is not None:
    layers = [None if place is None else {"stage": place[0], "repeat": place[1]} for place in found.layers]
    result |= {"layout": found.layout, "layers": layers}
  if (schedule := found.schedule) is not None:
    result["schedule"] = {
        "stages": schedule.stages,
        "repeats": schedule.repeats,
        "microbatches": schedule.microbatches,
        "delay": schedule.delay,
        "iterations": schedule.iterations,
        "bubble_fraction": schedule.bubble_fraction,
    }
  if (costs := found.costs) is not None:
    result["memory"] = {"when": costs.worst_phase, "bytes": costs.memory, "total": costs.peak}
    result["memory"]["of_device"] = found.device_memory
    result["sent"] = {"bytes": costs.traffic, "total": costs.sent, "between_slices": costs.between_slices}
  if found.not_counted:
    result["not_estimated"] = found.not_counted
  return result


def _print(result: dict[str, Any]) -> None:
  for kind in ("errors", "warnings"):
    for text in result[kind]:
      print(f"{kind[:-1]}: {text}")
  if "layout" in result:
    print(f"{units.counted(result['devices'], 'device')}: {result['layout']}")
    for line in _layer_lines(result["layers"]):
      print(line)
  if schedule := result.get("schedule"):
    print(f"schedule: {_schedule_text(schedule)}")
  if memory := result.get("memory"):
    stages = schedule["stages"] if schedule else 1
    when = labels.phases(stages)[memory["when"]]
    of_device = f" of {units.bytes_text(memory['of_device'])}" if memory["of_device"] else ""
    print(f"memory of a device, estimated: {units.bytes_text(memory['total'])}{of_device}, {when}")
    _print_bytes(memory["bytes"], labels.parts(stages))
    sent = result["sent"]
    between = f", {units.bytes_text(sent['between_slices'])} of it between slices" if sent["between_slices"] else ""
    print(f"sent by a device in a step, estimated: {units.bytes_text(sent['total'])}{between}")
    _print_bytes(sent["bytes"], labels.SENT)
  if "not_estimated" in result:
    print("not estimated: " + "; ".join(result["not_estimated"]))
  print(units.counted(len(result["errors"]), "error") if result["errors"] else "no errors")


def _schedule_text(schedule: dict[str, Any]) -> str:
  fraction, iterations = schedule["bubble_fraction"], schedule["iterations"]
  text = units.counted(schedule["microbatches"], "microbatch")
  if schedule["stages"] > 1:
    idle = round(fraction * iterations)
    return f"{text}, {iterations} iterations, of which a stage idles in {idle}: bubble fraction {fraction:.3f}"
  if schedule["microbatches"] > 1:
    text += ", all of which pass through a layer before the next"
  return f"{text}: {units.counted(iterations, 'iteration')}"


def _print_bytes(sizes: Mapping[Any, int], names: Mapping[Any, str]) -> None:
  for what, size in sizes.items():
    if size:
      print(f"  {units.bytes_text(size):>8}  {names[what]}")


def _layer_lines(layers: list[dict[str, int] | None]) -> list[str]:
  """Returns a line per stage, with the layers of each repeat, and a line for the layers outside the pipeline."""
  places: dict[int, dict[int, list[int]]] = {}
  for layer, place in enumerate(layers):
    if place is not None:
      places.setdefault(place["stage"], {}).setdefault(place["repeat"], []).append(layer)
  lines = []
  for stage, repeats in sorted(places.items()):
    each = (", ".join(map(str, repeats[repeat])) for repeat in sorted(repeats))
    lines.append(f"  stage {stage}: layers {' | '.join(each)}")
  outside = [str(layer) for layer, place in enumerate(layers) if place is None]
  if places and outside:
    lines.append(f"  outside the pipeline, on every stage: layers {', '.join(outside)}")
  if places:
    lines.append("  (layers are counted from 0, a bar begins the next repeat)")
  return lines

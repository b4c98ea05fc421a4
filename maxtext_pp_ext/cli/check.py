# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Lists all problems of a run's config, and shows its layout, schedule and estimated costs, without compiling it.

  maxtext-pp check my.yml ici_pipeline_parallelism=4 pipeline_impl=circular_bsw

If names are mistyped, it lists all of these. Otherwise it lists all errors about pipelines, and the first of MaxText's
own. It shows which layer runs on which stage in which repeat, the schedule, and estimates of a device's memory and
traffic, with what they leave out (docs/how-it-works.md has the formulas), and which of compile_xla_flags a run needs in
its environment. With compile_topology it says whether the memory fits into a device. No devices are needed: the check is
for those of compile_topology, of --devices, or as many as the parallelism makes. The exit code is 2 if there is an error,
else 0, also with warnings.
"""

import argparse
from collections.abc import Mapping
from typing import Any

from maxtext_pp_ext import units
from maxtext_pp_ext.cli import maxtext, output
from maxtext_pp_ext.cli.errors import UNUSABLE
from maxtext_pp_ext.cli.tables import labels
from maxtext_pp_ext.host.models import run_config


def add_arguments(parser: argparse.ArgumentParser) -> None:
  parser.add_argument("--devices", type=int, metavar="N", help="how many devices the run is for")


def run(args: argparse.Namespace) -> int:
  maxtext.check_numbers({"--devices": args.devices}, most=run_config.MOST_DEVICES)
  maxtext.check_given(args.maxtext_args)
  if problems := maxtext.problems(args.maxtext_args):
    result = {"errors": problems, "warnings": [], "devices": None}
  else:
    with maxtext.imported("reading the config, building MaxText's model without arrays"):
      from maxtext_pp_ext.plan import check  # pylint: disable=import-outside-toplevel

      result = _result(check.check(args.maxtext_args, args.devices))
  output.print_result(result, args.json, _print)
  return UNUSABLE if result["errors"] else 0


def _result(found: Any) -> dict[str, Any]:
  result = {"errors": found.errors, "warnings": found.warnings, "devices": found.devices}
  if found.layout is not None:
    layers = [None if place is None else {"stage": place[0], "repeat": place[1]} for place in found.layers]
    result |= {"layout": found.layout, "layers": layers}
  if found.schedule is not None:
    of_schedule = ("stages", "repeats", "microbatches", "delay", "iterations", "bubble_fraction")
    result["schedule"] = {name: getattr(found.schedule, name) for name in of_schedule}
  if found.costs is not None:
    result |= labels.costs_dict(found.costs)
    result["memory"]["of_device"] = found.device_memory
    result |= {"seconds": found.estimate.seconds, "seconds_of": found.estimate.parts} if found.estimate else {}
  if found.not_counted:
    result["not_estimated"] = found.not_counted
  if found.flags:
    result["flags_to_export"] = found.flags
  return result


def _print(result: dict[str, Any]) -> None:
  for kind in ("errors", "warnings"):
    for text in result[kind]:
      print(f"{kind[:-1]}: {text}")
  if "layout" in result:
    print(f"{units.counted(result['devices'], 'device')}: {result['layout']}", *_layer_lines(result["layers"]), sep="\n")
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
  if offloaded := result.get("offloaded"):
    print(f"to the host's memory in a step, and back: {units.bytes_text(offloaded)}")
  if seconds := result.get("seconds"):
    print(f"a step takes, estimated: {seconds:.3g} s")
  if "not_estimated" in result:
    print("not estimated: " + "; ".join(result["not_estimated"]))
  if flags := result.get("flags_to_export"):
    print("compile_xla_flags is for ahead-of-time compilation; a run trains without it. For a run, on each host:")
    print(f'  export LIBTPU_INIT_ARGS="$LIBTPU_INIT_ARGS {" ".join(flags)}"')
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
  places: dict[int, dict[int, list[str]]] = {}
  outside: list[str] = []
  for layer, place in enumerate(layers):
    of_place = outside if place is None else places.setdefault(place["stage"], {}).setdefault(place["repeat"], [])
    of_place.append(str(layer))
  lines = []
  for stage, repeats in sorted(places.items()):
    each = (", ".join(of_repeat) for _, of_repeat in sorted(repeats.items()))
    lines.append(f"  stage {stage}: layers {' | '.join(each)}")
  if places and outside:
    lines.append(f"  outside the pipeline, on every stage: layers {', '.join(outside)}")
  return [*lines, "  (layers are counted from 0, a bar begins the next repeat)"] if places else []

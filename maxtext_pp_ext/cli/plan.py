# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Finds the possible pipelines of a model on a topology, and ranks them by closed-form costs.

  maxtext-pp plan my.yml compile_topology=v5p-256 [--validate 2]

Stages take their devices from the mesh axis that MaxText is asked to derive (-1), or from FSDP, or from data parallelism.
So do experts, unless the arguments have ici_expert_parallelism. Give it with keys that MaxText refuses without expert
parallelism, such as ragged_buffer_factor. So do the axes of --axes. Batch, sequence and all other axes stay as the
arguments say. Where a mesh has to divide axes of the torus of compile_topology, the row sets
allow_split_physical_axes=True, unless the arguments have that key. "none" is the same model without a pipeline.

Seconds need the links of a slice. With --devices it is the slice of MaxText's table that has as many devices of --chip;
where the table has none, there are no seconds.

  batch parts  with --batch or --global-batch, a device's sequences in a part of a step, and how many parts follow one
               another (per_device_batch_size, gradient_accumulation_steps)
  S R L/S M    stages (4=2×2: two within a slice, on two slices), repeats, layers per stage and repeat, microbatches
  TP CP        with --axes, the devices within a slice that share each layer's matrices, and each sequence
  EP           of a model with experts, the devices within a slice that share them
  bubble       share of a stage's iterations in which it idles
  memory       what must fit into a device at the worst time of a step; "!": it does not, or what is offloaded does not
               fit into the host's memory; "?": it nearly fills the device, and the compiler may not find room for it all
  sent         by a device in a step
  step s       estimated seconds of a step, at the rates that compiled programs reach; not a measurement

--wide adds:

  state        of memory, parameters, the optimizer's moments and sharded gradients
  gathered     of memory, gathered weights of layers, and their gradients until these are reduced
  kept         of memory, what backward needs: the layers' inputs, and what the remat policy keeps
  work         of memory, microbatches in a layer and before it; or outputs, logits and gathered weights of the logits
  weights      of what is sent, weights of layers that are gathered and their gradients
  act.         of what is sent, activations and their gradients, to other stages
  outside      of what is sent, weights outside the pipeline and their gradients
  tokens       of what is sent, those of a model with experts to the experts, and the results
  layers       of what is sent, activations within layers, over axes such as tensor and context
  slices       of what is sent, all that goes to other slices
  to host      what goes to the host's memory in a step, and comes back; "!": it does not fit there
  tokens/s     of a device
  MFU          share of the chip's peak, by MaxText's count of FLOPs
  at least     seconds of a step if all transfers and compute overlap, at the vendor's peak rates
  at most      seconds of a step at the rates of the estimate, if nothing overlaps
  bound by     what takes longest at the vendor's peak rates

Ranking is by the seconds of a token: by "step s" if all have one batch. --batch 1,2,4 tries each in place of the run's
own; --global-batch 512 divides 512 sequences into parts of a step and devices, in all ways that give each device whole
sequences. Of candidates with the same implementation and the same stages only the best is shown, also of those that
differ in TP, CP, EP or batch, unless there is --all. Below the table are the keys to set for each row.
docs/how-it-works.md has the formulas of bytes, docs/seconds.md that of seconds, and docs/choosing.md says how far they
are from the compiler's figures. --validate compiles the best for the TPUs of compile_topology, which need not be present,
projects their seconds, and shows both. --write writes the first row, or that of --row, as a yml file for MaxText's
trainers.

If nothing fits, the candidates are shown that need least memory, and the keys that would make one fit. Each of these is
estimated like a candidate. --write then writes nothing, unless --row says which.
"""

import argparse
import dataclasses
import functools
import pathlib
import shlex
from typing import Any

from maxtext_pp_ext import registry, units
from maxtext_pp_ext.cli import maxtext, output
from maxtext_pp_ext.cli.errors import CommandError, FAILED, refusing
from maxtext_pp_ext.cli.tables import labels
from maxtext_pp_ext.cli.tables import plan as plan_table
from maxtext_pp_ext.cli.tables.plan import name_of
from maxtext_pp_ext.compiled import limits
from maxtext_pp_ext.hardware import chips, torus
from maxtext_pp_ext.host import arguments, topology
from maxtext_pp_ext.host.models import run_config, variants
from maxtext_pp_ext.nearest import did_you_mean
from maxtext_pp_ext.plan.costs import AXES, BATCH

_DEFAULT = "none,circular,circular_bsw,circular_ag_once"
_STAGES = "ici_pipeline_parallelism"
_NEAREST = 5  # candidates that are shown if nothing fits, and reasons if nothing is possible


def add_arguments(parser: argparse.ArgumentParser) -> None:
  number: dict[str, Any] = {"type": int, "metavar": "N"}
  flag: dict[str, Any] = {"action": "store_true"}
  add = parser.add_argument
  add("--impl", type=maxtext.listed, default=_DEFAULT, metavar="NAME,…", help="implementations (default: %(default)s)")
  batch = parser.add_mutually_exclusive_group()
  batch.add_argument("--batch", type=maxtext.listed, metavar="N,…", help="try each per_device_batch_size")
  batch.add_argument("--global-batch", **number, help="try each division of a step's N sequences")
  add("--axes", type=maxtext.listed, metavar="NAME,…", help="also try sizes of tensor, context, or both")
  add("--devices", **number, help="how many devices, without compile_topology")
  add("--chip", metavar="NAME", help="kind of the devices, instead of compile_topology's")
  add("--device-memory-gib", type=float, metavar="X", help="memory of a device, instead of the chip's")
  add("--top", default=10, **number, help="show the best N, and none (default: %(default)s)")
  add("--all", **flag, help="show all, also those that do not fit, and why others are impossible")
  add("--wide", **flag, help="show all columns, however wide the table gets")
  add("--validate", default=0, **number, help="compile the best N, and none, and compare")
  add("--write", type=pathlib.Path, metavar="FILE", help="write a row as a .yml file for MaxText")
  add("--row", **number, help="which row --write takes, counted from 1 (default: 1)")
  maxtext.add_network(parser)
  maxtext.add_bounds(parser)


def run(args: argparse.Namespace) -> int:
  _check(args)
  maxtext.check_arguments(args.maxtext_args)
  _check_devices(args)
  with maxtext.imported("reading the config") as shown:
    found = _plan(args, shown)
  if not found.candidates and (rest := (args.global_batch or 0) % found.devices):
    nearest = sorted({max(args.global_batch - rest, found.devices), args.global_batch - rest + found.devices})
    text = f"{found.devices} devices cannot divide it. Give {' or '.join(map(str, nearest))}."
    raise CommandError(f"--global-batch {args.global_batch}: {text}")
  if not found.candidates and not found.infeasible:
    raise CommandError(_why_none(args, found.devices))
  fits = any(map(found.fits, found.candidates))
  chosen = found.candidates if args.all else _best(found, args.top) if fits else found.distinct()[:_NEAREST]
  result = {
      "devices": found.devices,
      "slice": None,  # where it is not known
      "device_memory": found.memory_limit,
      "candidates": [_as_dict(found, candidate) for candidate in chosen],
      "not_estimated": found.not_counted,
  }
  if found.slice is not None:
    lengths = found.slice.lengths
    result["slice"] = {"topology": found.slice.name, "chips": lengths, "closed": torus.closed(lengths)}
  of_run = {*BATCH, _STAGES}  # of a batch, or of the model without a pipeline
  always = [each for each in found.infeasible if each["keys"].keys() <= of_run and each["keys"].get(_STAGES, 1) == 1]
  if impossible := found.infeasible if args.all else always if found.candidates else found.infeasible[:_NEAREST]:
    result["infeasible"] = impossible
  failed = not fits
  if fits:
    none = next((candidate for candidate in chosen if candidate.impl == variants.NONE), None)
    for rank, (candidate, row) in enumerate(zip(chosen, result["candidates"], strict=True)):
      if rank < args.validate or (args.validate and candidate is none):
        row["compiled"] = _compiled(candidate, args, found.chip)
        failed |= "failure" in row["compiled"]
    result["order"] = _order(result["candidates"])
  else:
    result["remedies"] = [dataclasses.asdict(remedy) for remedy in found.remedies]
  if args.write and (fits or args.row):
    result["written"] = _write(args, chosen, found)
  elif args.write:
    result["not_written"] = f"--write {args.write}: nothing was written, since nothing fits; --row 1 writes the nearest"
  with output.quiet():
    given = run_config.given_keys(args.maxtext_args)
  output.print_result(result, args.json, functools.partial(plan_table.show, found=found, given=given, wide=args.wide))
  return FAILED if failed else 0


def _why_none(args: argparse.Namespace, devices: int) -> str:
  """Says why there is no way to run the model, as `check` does of the first implementation for which it knows."""
  from maxtext_pp_ext.plan import check  # pylint: disable=import-outside-toplevel

  for impl in args.impl:
    changed = [] if impl == variants.NONE else [f"pipeline_impl={impl}"]
    with output.quiet():
      found = check.check([*args.maxtext_args, *changed], args.devices)
    if found.errors:
      return "\n".join(["There is no way to run the model:", *found.errors])
  return f"There is no way to run the model on {units.counted(devices, 'device')} with these arguments."


def _write(args: argparse.Namespace, chosen: list[Any], found: Any) -> str:
  if (row := args.row or 1) > len(chosen):
    raise CommandError(f"--row {row}: the table has only {units.counted(len(chosen), 'row')}.")
  candidate = chosen[row - 1]
  name = name_of(candidate.impl, candidate.keys, candidate.schedule.microbatches if candidate.schedule else None)
  comment = f"{name}, for {units.counted(found.devices, 'device')}; written by\nmaxtext-pp plan {shlex.join(args.given)}"
  with refusing(f"--write {args.write}: ", FAILED), output.quiet():
    run_config.write(args.write, args.maxtext_args, candidate.keys, found.devices, comment)
  return str(args.write)


def _order(rows: list[dict[str, Any]]) -> dict[str, list[str]] | None:
  """Returns the compiled rows by estimated and by projected seconds of a token; None if fewer than two are projected."""
  found = [row for row in rows if row.get("compiled", {}).get("seconds")]
  if len(found) < 2 or any(row["seconds"] is None for row in found):
    return None
  orders = {"estimated": sorted(found, key=lambda row: row["seconds"] / row["tokens"])}
  orders["projected"] = sorted(found, key=lambda row: row["compiled"]["seconds"] / row["tokens"])
  return {
      kind: [name_of(row["impl"], row["keys"], row["microbatches"]) for row in order] for kind, order in orders.items()
  }


def _best(found: Any, count: int) -> list[Any]:
  """Returns the best `count` that fit, one of each kind, and the model without a pipeline for comparison."""
  fitting = [each for each in found.distinct() if found.fits(each)]
  return fitting[:count] + [each for each in fitting[count:] if each.impl == variants.NONE]


def _check(args: argparse.Namespace) -> None:
  maxtext.check_numbers({"--devices": args.devices}, most=run_config.MOST_DEVICES)
  numbers = {"--device-memory-gib": args.device_memory_gib, "--top": args.top, "--row": args.row}
  numbers |= {"--global-batch": args.global_batch, "--dcn-gbps": args.dcn_gbps}
  for size in args.batch or ():
    if not (size.replace(".", "", 1).isdecimal() and float(size)):
      raise CommandError(f"--batch {size}: is no positive number. Give sequences per device, such as 1,2,4.")
  if args.batch == []:
    raise CommandError("--batch: names nothing. Give sequences per device, such as 1,2,4.")
  maxtext.check_numbers(numbers | {"--minutes": args.minutes, "--memory-gib": args.memory_gib})
  known = (variants.NONE, *(name for name in registry.names() if name != registry.HOST))
  maxtext.check_names("--impl", args.impl, known)
  if args.axes is not None:
    maxtext.check_names("--axes", args.axes, AXES)
  if args.chip is not None and args.chip not in chips.CHIPS:
    known_chips = f"known chips are {', '.join(chips.CHIPS)}{did_you_mean(args.chip, chips.CHIPS)}"
    raise CommandError(f"--chip {args.chip}: {known_chips}")
  if args.validate < 0:
    raise CommandError(f"--validate {args.validate}: cannot be negative.")
  if args.row and not args.write:
    raise CommandError(f"--row {args.row}: needs --write.")
  most = args.top + (variants.NONE in args.impl)
  if args.row and args.row > most and not args.all:
    raise CommandError(f"--row {args.row}: the table has at most {most} rows. Give a larger --top, or --all.")
  if args.write:
    maxtext.check_output("--write", args.write, (".yml",))
    if args.write.exists():
      raise CommandError(f"--write {args.write}: the file exists. Choose another name.")


def _check_devices(args: argparse.Namespace) -> None:
  """Raises CommandError unless the arguments say for which devices the plan is. A file that cannot be read passes."""
  if (given := arguments.given(args.maxtext_args)) is None:
    return
  topology = given.get("compile_topology")
  if topology and args.devices:
    raise CommandError(f"--devices {args.devices} with compile_topology={topology}: give one of them.")
  if not topology and not args.devices:
    raise CommandError("Which devices? Give compile_topology=, such as v5p-256, or --devices N.")
  if not topology and args.validate:
    raise CommandError("--validate needs compile_topology=, the TPUs to compile for.")


def _plan(args: argparse.Namespace, shown: output.Progress) -> Any:
  from maxtext_pp_ext.plan import search  # pylint: disable=import-outside-toplevel

  def on_progress(done: int, total: int) -> None:
    if not done:
      shown.text = "estimating layouts without compiling them"
    shown.done, shown.total = done, total

  return search.plan(
      args.maxtext_args,
      implementations=args.impl,
      devices=args.devices,
      chip=maxtext.with_network(_chip(args), args, run_config.given_keys(args.maxtext_args)),
      batches=_batches(args),
      axes=args.axes or (),
      memory_limit=round(args.device_memory_gib * limits.GIB) if args.device_memory_gib else None,
      shown=args.top,
      every=args.all,
      on_progress=on_progress,
  )


def _chip(args: argparse.Namespace) -> chips.Chip | None:
  given = run_config.given_keys(args.maxtext_args)
  return chips.CHIPS[args.chip] if args.chip else chips.of_topology(given.get("compile_topology") or "")


def _batches(args: argparse.Namespace) -> list[dict[str, Any]]:
  """Returns the keys of each batch to try; those of the run are {}."""
  if args.batch:
    sizes = dict.fromkeys(map(float, args.batch))
    return [{BATCH[0]: int(size) if size.is_integer() else size} for size in sizes]
  if not args.global_batch:
    return [{}]
  from maxtext_pp_ext.plan.result import divisions  # pylint: disable=import-outside-toplevel

  given = run_config.given_keys(args.maxtext_args)
  slices = max(run_config.integer(given, "compile_topology_num_slices"), 1)
  devices = args.devices or slices * topology.devices(given["compile_topology"])
  found = divisions(args.global_batch, devices)
  parts = BATCH[1]
  if (own := (arguments.given(args.maxtext_args) or {}).get(parts)) is None:
    return found
  if not (same := [each for each in found if str(each[parts]) == str(own)]):
    could = ", ".join(str(each[parts]) for each in found)
    raise CommandError(f"--global-batch {args.global_batch} with {parts}={own}: on {devices} devices it can be {could}.")
  return same


def _as_dict(found: Any, candidate: Any) -> dict[str, Any]:
  schedule, estimate = candidate.schedule, candidate.estimate
  return {
      "impl": candidate.impl,
      "keys": candidate.keys,
      "stages": schedule.stages if schedule else 1,
      "repeats": schedule.repeats if schedule else None,
      "layers_per_stage": candidate.layers_per_stage,
      "microbatches": schedule.microbatches if schedule else None,
      "bubble_fraction": schedule.bubble_fraction if schedule else 0.0,
      "fits": found.fits(candidate),
      "missing": dict(zip(("device", "host"), found.missing(candidate.costs), strict=True)),
      "nearly_full": found.nearly_full(candidate.costs.peak),
      **labels.costs_dict(candidate.costs),
      "seconds": candidate.seconds,
      "tokens": candidate.tokens,
      "tokens_per_s": candidate.tokens / candidate.seconds if candidate.seconds else None,
      "mfu": candidate.flops / (candidate.seconds * found.chip.flops) if candidate.seconds else None,
      "seconds_of": estimate.parts if estimate else None,
      "seconds_at_least": estimate.at_least if estimate else None,
      "seconds_at_most": estimate.at_most if estimate else None,
      "bound_by": candidate.bound_by,
  }


def _compiled(candidate: Any, args: argparse.Namespace, chip: Any) -> dict[str, Any]:
  """Returns the compiler's figures for what was predicted, and projected seconds; or `failure`."""
  from maxtext_pp_ext.compiled.program import collectives  # pylint: disable=import-outside-toplevel

  argv = variants.arguments(candidate.impl, run_config.with_keys(args.maxtext_args, candidate.keys), platform="tpu")
  figures = maxtext.compiled(name_of(candidate.impl, candidate.keys), argv, args, chip=chip)
  if "failure" in figures:
    return {"failure": figures["failure"]}
  wire = figures["wire_GB"]
  return {
      "seconds": figures.get("projection", {}).get("step_s"),
      "memory": figures["bytes"]["peak"],
      "sent": round(sum(wire.values()) * 1e9),
      "between_slices": round(wire.get(collectives.BETWEEN_SLICES, 0) * 1e9),
  }

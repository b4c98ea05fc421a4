# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Finds the possible pipelines of a model on a topology, and ranks them by closed-form costs.

  maxtext-pp plan my.yml compile_topology=v5p-256 [--validate 2]

Stages take their devices from the mesh axis that MaxText is asked to derive (-1), or from FSDP, or from data parallelism;
batch, sequence, tensor and expert parallelism stay as the arguments say. "none" is the same model without a pipeline.

  S R L/S M    stages (4=2×2: two within a slice, on two slices), repeats, layers per stage and repeat, microbatches
  bubble       share of a stage's iterations in which it idles
  memory       what must fit into a device at the worst time of a step
  window       of that, gathered weights and sums of gradients
  kept         of that, the stages' inputs that backward needs
  weights      sent by a device in a step to gather weights and to reduce their gradients
  act.         sent to other stages: activations and their gradients
  sent         in all
  slices       of that, to other slices
  step s       estimated seconds of a step, at the rates that compiled programs reach; not a measurement
  at least     seconds of a step if all transfers and compute overlap, at the vendor's peak rates
  at most      seconds of a step at the rates of the estimate, if nothing overlaps
  bound by     what takes longest at the vendor's peak rates

Ranking is by "step s". docs/how-it-works.md has the formulas of bytes, docs/seconds.md that of seconds, and
docs/choosing.md says how far they are from the compiler's figures. --validate compiles the best for the TPUs of
compile_topology, which need not be present, projects their seconds, and shows both. --write writes the first row, or that
of --row, as a yml file for MaxText's trainers.

If nothing fits, the candidates are shown that need least memory, and the keys that would make one fit. Each of these is
estimated like a candidate.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
import dataclasses
import pathlib
import shlex
import sys
from typing import Any

from maxtext_pp_ext import registry, units
from maxtext_pp_ext.cli import maxtext, output
from maxtext_pp_ext.cli.errors import CommandError, FAILED, REFUSALS
from maxtext_pp_ext.config.remedies import value_text
from maxtext_pp_ext.host.models import refusals
from maxtext_pp_ext.nearest import did_you_mean
from maxtext_pp_ext.plan import chips

_DEFAULT = "none,circular,circular_bsw,circular_ag_once"
_NONE = "none"  # variants.NONE, which takes longer to import
_GIB = 1 << 30
_NEAREST = 5  # candidates that are shown if nothing fits


def add_arguments(parser: argparse.ArgumentParser) -> None:
  parser.add_argument("--impl", default=_DEFAULT, metavar="NAME,…", help="implementations (default: %(default)s)")
  parser.add_argument("--devices", type=int, metavar="N", help="how many devices, without compile_topology")
  parser.add_argument("--chip", metavar="NAME", help="kind of the devices, instead of compile_topology's")
  parser.add_argument("--device-memory-gib", type=float, metavar="X", help="memory of a device, instead of the chip's")
  parser.add_argument("--top", type=int, default=10, metavar="N", help="show the best N, and none (default: %(default)s)")
  parser.add_argument(
      "--all", action="store_true", help="show all, also those that do not fit, and why others are impossible"
  )
  parser.add_argument("--validate", type=int, default=0, metavar="N", help="compile the best N, and none, and compare")
  parser.add_argument("--write", type=pathlib.Path, metavar="FILE", help="write a row as a .yml file for MaxText")
  parser.add_argument("--row", type=int, metavar="N", help="which row --write takes, counted from 1 (default: 1)")
  maxtext.add_bounds(parser)


def run(args: argparse.Namespace) -> int:
  names = list(dict.fromkeys(filter(None, args.impl.split(","))))
  chip = _check(args, names)
  maxtext.check_arguments(args.maxtext_args)
  maxtext.prepare()
  with output.progress("importing MaxText") as shown:
    try:
      with output.quiet():
        found = _plan(args, names, chip, shown)
    except REFUSALS as error:
      raise CommandError(str(error)) from error
  fits = any(map(found.fits, found.candidates))
  chosen = _best(found, args.top) if fits and not args.all else found.candidates[: None if args.all else _NEAREST]
  result = {
      "devices": found.devices,
      "device_memory": found.memory_limit,
      "candidates": [_as_dict(found, candidate) for candidate in chosen],
      "not_estimated": found.not_counted,
  }
  if args.all:
    result["infeasible"] = [{"keys": each.keys, "reason": each.reason} for each in found.infeasible]
  if not fits:
    result["ways"] = [dataclasses.asdict(way) for way in found.ways]
    _show(args, result, found)
    return FAILED
  failed = False
  for rank, (candidate, row) in enumerate(zip(chosen, result["candidates"], strict=True)):
    if rank < args.validate or (args.validate and candidate.schedule is None):
      row["compiled"] = _compiled(candidate, args, found.chip)
      failed |= "failure" in row["compiled"]
  result["order"] = _order(result["candidates"])
  if args.write:
    result["written"] = _write(args, chosen, found)
  _show(args, result, found)
  return FAILED if failed else 0


def _write(args: argparse.Namespace, chosen: list[Any], found: Any) -> str:
  from maxtext_pp_ext.host import run_file  # pylint: disable=import-outside-toplevel

  if (row := args.row or 1) > len(chosen):
    raise CommandError(f"--row {row}: there are {len(chosen)} rows.")
  candidate = chosen[row - 1]
  microbatches = candidate.schedule.microbatches if candidate.schedule else None
  name = _name(candidate.impl, candidate.keys, microbatches)
  comment = f"{name}, for {units.counted(found.devices, 'device')}; written by\nmaxtext-pp plan {shlex.join(args.given)}"
  try:
    with output.quiet():
      run_file.write(args.write, args.maxtext_args, candidate.keys, found.devices, comment)
  except REFUSALS as error:
    raise CommandError(f"--write {args.write}: {error}", FAILED) from error
  return str(args.write)


def _order(rows: list[dict[str, Any]]) -> dict[str, list[str]] | None:
  """Returns the compiled rows by estimated and by projected seconds; None if fewer than two are projected."""
  found = [row for row in rows if row.get("compiled", {}).get("seconds")]
  if len(found) < 2 or any(row["seconds"] is None for row in found):
    return None
  by = lambda seconds: [_name(row["impl"], row["keys"], row["microbatches"]) for row in sorted(found, key=seconds)]
  return {"estimated": by(lambda row: row["seconds"]), "projected": by(lambda row: row["compiled"]["seconds"])}


def _best(found: Any, count: int) -> list[Any]:
  """Returns the best `count` that fit, and the model without a pipeline for comparison."""
  fitting = [each for each in found.candidates if found.fits(each)]
  return fitting[:count] + [each for each in fitting[count:] if each.schedule is None]


def _show(args: argparse.Namespace, result: dict[str, Any], found: Any) -> None:
  if args.json:
    output.print_json(result)
  else:
    _print(result, found)


def _check(args: argparse.Namespace, names: list[str]) -> Any:
  maxtext.check_numbers({"--devices": args.devices}, most=refusals.MOST_DEVICES)
  maxtext.check_numbers({"--device-memory-gib": args.device_memory_gib, "--top": args.top})
  maxtext.check_numbers({"--minutes": args.minutes, "--memory-gib": args.memory_gib})
  maxtext.check_names("--impl", names, (_NONE, *(name for name in registry.names() if name != registry.HOST)))
  if args.chip is not None and args.chip not in chips.CHIPS:
    known = f"known chips are {', '.join(chips.CHIPS)}{did_you_mean(args.chip, chips.CHIPS)}"
    raise CommandError(f"--chip {args.chip}: {known}")
  if args.validate < 0:
    raise CommandError(f"--validate {args.validate}: cannot be negative.")
  maxtext.check_numbers({"--row": args.row})
  if args.row and not args.write:
    raise CommandError(f"--row {args.row}: needs --write.")
  if args.write:
    maxtext.check_output("--write", args.write, (".yml",))
    if args.write.exists():
      raise CommandError(f"--write {args.write}: the file exists. Choose another name.")
  return chips.CHIPS[args.chip] if args.chip else None


def _plan(args: argparse.Namespace, names: list[str], chip: Any, shown: output.Progress) -> Any:
  from maxtext_pp_ext.host import postponed  # pylint: disable=import-outside-toplevel
  from maxtext_pp_ext.host.models import run_config  # pylint: disable=import-outside-toplevel
  from maxtext_pp_ext.plan import search  # pylint: disable=import-outside-toplevel

  postponed.import_maxtext()
  shown.now("reading the config")
  topology = run_config.given_keys(args.maxtext_args).get("compile_topology")
  if topology and args.devices:
    raise ValueError(f"--devices {args.devices} with compile_topology={topology}: give one of them.")
  if not topology and not args.devices:
    raise ValueError("Which devices? Give compile_topology=, such as v5p-256, or --devices N.")
  if not topology and args.validate:
    raise ValueError("--validate needs compile_topology=, the TPUs to compile for.")

  def on_progress(done: int, total: int) -> None:
    if not done:
      shown.now("estimating layouts without compiling them")
    shown.at(done, total)

  limit = round(args.device_memory_gib * _GIB) if args.device_memory_gib else None
  return search.plan(
      args.maxtext_args,
      implementations=names,
      devices=args.devices,
      chip=chip,
      memory_limit=limit,
      shown=args.top,
      on_progress=on_progress,
  )


def _as_dict(found: Any, candidate: Any) -> dict[str, Any]:
  costs, schedule, estimate = candidate.costs, candidate.schedule, candidate.estimate
  return {
      "impl": candidate.impl,
      "keys": candidate.keys,
      "stages": schedule.stages if schedule else 1,
      "repeats": schedule.repeats if schedule else None,
      "layers_per_stage": candidate.layers_per_stage,
      "microbatches": schedule.microbatches if schedule else None,
      "bubble_fraction": schedule.bubble_fraction if schedule else 0.0,
      "fits": found.fits(candidate),
      "memory": {"when": costs.worst_phase, "bytes": costs.memory, "total": costs.peak},
      "sent": {"bytes": costs.traffic, "total": costs.sent, "between_slices": costs.between_slices},
      "seconds": candidate.seconds,
      "seconds_of": estimate.parts if estimate else None,
      "seconds_at_least": estimate.at_least if estimate else None,
      "seconds_at_most": estimate.at_most if estimate else None,
      "bound_by": candidate.bound_by,
  }


def _compiled(candidate: Any, args: argparse.Namespace, chip: Any) -> dict[str, Any]:
  """Returns the compiler's figures for what was predicted, and projected seconds; or `failure`."""
  from maxtext_pp_ext.compiled import compare, traffic  # pylint: disable=import-outside-toplevel
  from maxtext_pp_ext.host.models import train_step, variants  # pylint: disable=import-outside-toplevel

  bounds = maxtext.bounds(args)
  arguments = variants.arguments(candidate.impl, candidate.arguments(args.maxtext_args), platform="tpu")
  with output.progress(f"compiling {_name(candidate.impl, candidate.keys)}") as shown:
    on_tick = lambda _, memory: shown.say(maxtext.memory_text(memory, bounds.memory_bytes))
    figures = compare.figures(
        arguments,
        bounds=bounds,
        batch=train_step.BATCH,
        optimizer=train_step.OPTIMIZER,
        chip=chip,
        on_tick=on_tick,
    )
  if "failure" in figures:
    return {"failure": figures["failure"]}
  wire = figures["wire_GB"]
  return {
      "seconds": figures.get("projection", {}).get("step_s"),
      "memory": figures["bytes"]["peak"],
      "sent": round(sum(wire.values()) * 1e9),
      "between_slices": round(wire.get(traffic.BETWEEN_SLICES, 0) * 1e9),
  }


def _name(impl: str, keys: dict[str, Any], microbatches: int | None = None) -> str:
  stages = keys.get("ici_pipeline_parallelism", 1) * keys.get("dcn_pipeline_parallelism", 1)
  if stages == 1:
    return f"{impl}, {microbatches} microbatches" if microbatches and microbatches > 1 else impl
  per_stage = keys["num_layers_per_pipeline_stage"]
  of = f", {per_stage} layer{'s' * (per_stage != 1)}, {microbatches} microbatches" if microbatches else ""
  return f"{impl}, {stages} stages{of}"


def _print(result: dict[str, Any], found: Any) -> None:
  from rich import box, console, table, text  # pylint: disable=import-outside-toplevel

  screen = console.Console(width=None if sys.stdout.isatty() else 160, highlight=False)
  say = lambda line: screen.print(text.Text(line))
  limit = f" of {units.bytes_text(result['device_memory'])}" if result["device_memory"] else ""
  rows = result["candidates"]
  fits = sum(map(found.fits, found.candidates))
  fitting = f", {fits} of them fit, the best" if limit and fits else "; none of them fits, the nearest" if limit else ""
  count = f"{units.counted(len(found.candidates), 'way')} to run the model{fitting}"
  say(f"{units.counted(result['devices'], 'device')}{limit}: {count} {len(rows)} are shown")
  if rows:
    shown = table.Table(box=box.HORIZONTALS)
    for heading in _HEADINGS:
      first = heading == _HEADINGS[0]
      shown.add_column(heading, justify="left" if first else "right", no_wrap=True)
    for row in rows:
      shown.add_row(*map(text.Text, _cells(row)))
    screen.print(shown)
  if found.chip is None:
    say(f"no seconds, since the kind of the devices is not known: give --chip {', '.join(chips.CHIPS)}")
  for line in _ways(result, found):
    say(line)
  best = next((row for row in rows if row["stages"] > 1 and row["fits"]), None)
  if best is not None:
    say("the first pipeline: " + " ".join(f"{key}={value}" for key, value in _keys_to_set(best).items()))
  if result["not_estimated"]:
    say("not estimated, in none of them: " + "; ".join(result["not_estimated"]))
  _print_compiled(rows, result.get("order"), say)
  if "written" in result:
    say(f"wrote {result['written']}: check it with: maxtext-pp check {result['written']}")
  for each in result.get("infeasible", ()):
    say(f"cannot be: {' '.join(f'{key}={value}' for key, value in each['keys'].items())}: {each['reason']}")


def _ways(result: dict[str, Any], found: Any) -> Iterator[str]:
  """Yields what would make the model fit; nothing if it fits."""
  if "ways" not in result or not result["device_memory"]:
    return
  if result["candidates"]:
    missing = result["candidates"][0]["memory"]["total"] - result["device_memory"]
    yield f"the first lacks {units.bytes_text(missing)} per device; with other keys, each estimated:"
  for way in found.ways:
    keys = ", ".join(
        f"{_OPTIONS.get(key, f'{key}=')}{value_text(value)} (now {_now(way.before[key])})"
        for key, value in way.keys.items()
    )
    ends = f"lacks {units.bytes_text(way.missing)}" if way.missing else "fits"
    yield f"  {keys}: {units.bytes_text(way.memory)}, {ends}"
  yield "  remat_policy=full, which keeps least, is assumed. What offloading to the host saves is not estimated."


# Keys that are set by options here.
_OPTIONS = {"internal_compile_num_devices": "--devices "}


def _now(value: Any) -> str:
  return "not set" if value in (None, "") else value_text(value)


_HEADINGS = (
    *("pipeline", "S", "R", "L/S", "M", "bubble", "memory", "window", "kept", "weights", "act.", "sent", "slices"),
    *("step s", "at least", "at most", "bound by"),
)
_WINDOW = ("weight window", "gathered weights", "sums of", "gradients of", "their gradients", "weights that")


def _cells(row: dict[str, Any]) -> list[str]:
  memory, sent = row["memory"]["bytes"], row["sent"]["bytes"]
  part = lambda *names: units.bytes_text(sum(size for name, size in memory.items() if name.startswith(names)))
  seconds = lambda value: "–" if value is None else f"{value:.3g} s"
  between = row["sent"]["between_slices"]
  return [
      row["impl"],
      _stages(row),
      str(row["repeats"] or "–"),
      str(row["layers_per_stage"]),
      str(row["microbatches"] or "–"),
      f"{row['bubble_fraction']:.1%}",
      units.bytes_text(row["memory"]["total"]) + ("" if row["fits"] else " !"),
      part(*_WINDOW),
      part("stages' inputs", "layers' inputs"),
      units.bytes_text(sent["weights"] + sent["gradients"]),
      units.bytes_text(sent["activations"]),
      units.bytes_text(row["sent"]["total"]),
      units.bytes_text(between) if between else "–",
      seconds(row["seconds"]),
      seconds(row["seconds_at_least"]),
      seconds(row["seconds_at_most"]),
      row["bound_by"] or "–",
  ]


def _stages(row: dict[str, Any]) -> str:
  """Returns the number of stages; 4=2×2 means 2 within a slice, on 2 slices."""
  ici, dcn = (row["keys"].get(f"{network}_pipeline_parallelism", 1) for network in ("ici", "dcn"))
  return str(ici) if dcn == 1 else f"{ici * dcn}={ici}×{dcn}"


def _keys_to_set(row: dict[str, Any]) -> dict[str, Any]:
  """Returns the keys without those that have the default or only possible value."""
  kept = {"pipeline_impl", "num_pipeline_microbatches", "num_layers_per_pipeline_stage"}
  return {
      key: value for key, value in row["keys"].items() if key in kept or (key.endswith("_parallelism") and value != 1)
  }


def _print_compiled(rows: list[dict[str, Any]], order: dict[str, list[str]] | None, say: Any) -> None:
  for row in rows:
    if (compiled := row.get("compiled")) is None:
      continue
    name = _name(row["impl"], row["keys"])
    if "failure" in compiled:
      say(f"{name}: not compiled: {compiled['failure']}")
      continue
    pairs = {
        "memory": row["memory"]["total"],
        "sent": row["sent"]["total"],
        "between_slices": row["sent"]["between_slices"],
    }
    texts = []
    if (projected := compiled["seconds"]) and row["seconds"]:
      error = f"{row['seconds'] / projected - 1:+.0%}"
      texts.append(f"step {row['seconds']:.3g} s, projected {projected:.3g} s ({error})")
    for what, predicted in pairs.items():
      if actual := compiled[what]:
        words = f"{what.replace('_', ' ')} {units.bytes_text(predicted)}, compiled {units.bytes_text(actual)}"
        texts.append(f"{words} ({predicted / actual - 1:+.0%})")
    say(f"{name}: {'; '.join(texts)}")
  if order and order["estimated"] == order["projected"]:
    say("the order by projected seconds is the same")
  elif order:
    say(f"the order by projected seconds is another: {'; '.join(order['projected'])}")

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Compiles one run's train step with several pipelines, and with none, and compares the compiled programs.

  maxtext-pp compare my.yml compile_topology=v5p-256 ici_pipeline_parallelism=4 --impl none,host,circular_bsw

It compiles for the TPUs of compile_topology, which need not be present, or without that key for virtual CPU devices.
Figures are per device and step. "none" is the same model without a pipeline, with its stages' devices given to FSDP;
"host-bsw" and "host-ag-once" are MaxText's pipeline_fsdp_ag_per_repeat and pipeline_fsdp_ag_once.

  peak      what must fit into a device's memory at once, arguments included. A step that does not fit into the TPU's
            is not compiled, and its row says so. The CPU compiler does not report it.
  temp      temporary buffers, counted without reuse of each other's memory
  carries   what collectives carry, inferred from where the program takes their data from and uses them
  overlap   share of the bytes with a matrix multiplication or kernel between start and end of the transfer; a CPU's
            transfers are synchronous
  FLOPs     of matrix multiplications; those within TPU kernels are not counted
  step      projected seconds, and what they go to: products, TPU kernels, other compute, transfers that nothing hides. Of
            the compute, bubbles are what stages compute while they idle, and "again" is rematerialisation. A projection
            from the compiler's estimate of cycles and the bandwidth of links, not a measurement. MFU is MaxText's own
            count of FLOPs by the chip's peak

--flags adds MaxText's own sets of XLA flags to compile_xla_flags, for all implementations alike.

--trace writes the projected step for ui.perfetto.dev, --picture draws an iteration of each direction of it.

--run also trains, on CPU devices: MaxText's step with its optimizer on a synthetic batch. All steps are compiled once
more, in one process, and take turns: each round runs each step once, in rotating order. A ratio compares a step with the
first of --impl that ran, within the round. The table shows medians over rounds, and in brackets the lower and upper
quartile of the ratios. Transfers between virtual devices are copies in memory, and all devices share this machine's
cores: times show whether a step computes or copies more than another, not how long it would take on TPUs.
"""

from __future__ import annotations

import argparse
import importlib
import pathlib
import sys
from typing import Any

from maxtext_pp_ext import units
from maxtext_pp_ext.cli import compiling, maxtext, output
from maxtext_pp_ext.cli.errors import CommandError, FAILED, REFUSALS
from maxtext_pp_ext.compiled import flags

_DEFAULT = "none,host,circular,circular_bsw,circular_ag_once"
_MOST_CPU_DEVICES = 4096
_ROUNDS = 7
_KINDS = ("all-gather", "reduce-scatter", "all-reduce", "collective-permute", "all-to-all", "ragged-all-to-all")


def add_arguments(parser: argparse.ArgumentParser) -> None:
  parser.add_argument("--impl", default=_DEFAULT, metavar="NAME,…", help="implementations (default: %(default)s)")
  parser.add_argument(
      "--devices", type=int, metavar="N", help="virtual CPU devices, without compile_topology (default: 8)"
  )
  parser.add_argument(
      "--flags", default="", metavar="NAME,…", help="sets of XLA flags of MaxText's, such as DENSE_VMEM_LIMIT_FLAG"
  )
  parser.add_argument("--run", action="store_true", help="also run the steps, on CPU devices, and compare their times")
  parser.add_argument("--rounds", type=int, metavar="N", help=f"rounds of --run that are measured (default: {_ROUNDS})")
  compiling.add_arguments(parser, "each, and for --run in all")
  parser.add_argument("--output", type=pathlib.Path, metavar="FILE", help="draw bars into an .svg or .png file")
  parser.add_argument(
      "--trace", type=pathlib.Path, metavar="FILE", help="write the projected step into a .json.gz file for each --impl"
  )
  parser.add_argument(
      "--picture",
      type=pathlib.Path,
      metavar="FILE",
      help="draw an iteration of it into an .svg or .png file for each --impl",
  )


def run(args: argparse.Namespace) -> int:
  maxtext.check_arguments(args.maxtext_args)
  names, sets = _listed(args.impl), _listed(args.flags)
  _check(args, names, sets)
  maxtext.prepare()
  with output.progress("reading the config"), output.quiet():
    devices, described, arguments = _arguments(args, names, sets)
  bounds = compiling.bounds(args)
  rows = {name: _row(name, arguments[name], devices, bounds, args) for name in names}
  found: dict[str, Any] = {"devices": described, "versions": _versions(), "implementations": rows}
  if sets:
    found["flags"] = {name: " ".join(flags.SETS[name].split()) for name in sets}
  computed = {name: arguments[name] for name, row in rows.items() if "failure" not in row}
  if args.run and computed:
    rounds = args.rounds or _ROUNDS
    found["run"] = _run(computed, devices, rounds, bounds)  # type: ignore[arg-type]  # not None, see `_arguments`
    for name, step in found["run"].pop("steps", {}).items():
      rows[name]["run"] = step
  if args.output and computed:
    from maxtext_pp_ext.compiled import bars  # pylint: disable=import-outside-toplevel

    bars.draw(rows, args.output, described)
  if args.json:
    output.print_json(found)
  else:
    _print(found)
  return 0 if computed and not _run_failures(found) else FAILED


def _listed(text: str) -> list[str]:
  return list(dict.fromkeys(filter(None, text.split(","))))


def _check(args: argparse.Namespace, names: list[str], sets: list[str]) -> None:
  if not names:
    raise CommandError("--impl names nothing.")
  for name in sets:
    try:
      flags.named(name)
    except ValueError as error:
      raise CommandError(str(error)) from error
  pictures, traces = (".svg", ".png"), (".json.gz",)
  for option, file, suffixes in (
      ("--output", args.output, pictures),
      ("--picture", args.picture, pictures),
      ("--trace", args.trace, traces),
  ):
    if file and not file.name.endswith(suffixes):
      raise CommandError(f"{option} {file}: the name has to end in {' or '.join(suffixes)}.")
    if file and not file.absolute().parent.is_dir():
      raise CommandError(f"{option} {file}: there is no folder {file.absolute().parent}.")
  maxtext.check_numbers({"--minutes": args.minutes, "--memory-gib": args.memory_gib, "--rounds": args.rounds})
  maxtext.check_numbers({"--devices": args.devices}, most=_MOST_CPU_DEVICES)
  if args.rounds is not None and not args.run:
    raise CommandError(f"--rounds {args.rounds}: needs --run.")
  # A missing package is reported before hours of compiling.
  for package in (["matplotlib"] if args.output or args.picture else []) + ([] if args.json else ["rich"]):
    importlib.import_module(package)


def _arguments(
    args: argparse.Namespace, names: list[str], sets: list[str]
) -> tuple[int | None, str, dict[str, list[str]]]:
  """Returns (CPU devices, None for a TPU topology; the devices in words; implementation -> MaxText's arguments)."""
  from maxtext_pp_ext.host.models import refusals, run_config, variants  # pylint: disable=import-outside-toplevel
  from maxtext_pp_ext.plan import chips  # pylint: disable=import-outside-toplevel

  try:
    given = run_config.given_keys(args.maxtext_args)
    topology = given.get("compile_topology", "")
    devices = None if topology else args.devices or 8
    if topology and args.devices:
      raise CommandError(f"--devices is for CPU devices, and compile_topology={topology} for TPUs: give one of them.")
    if (args.trace or args.picture) and chips.of_topology(topology) is None:
      raise CommandError(
          f"--trace and --picture need a projection, which is for compile_topology of {', '.join(chips.CHIPS)}, not "
          f"{topology or 'CPU devices'}."
      )
    if topology and args.run:
      raise CommandError(f"--run is for CPU devices, and compile_topology={topology} for TPUs: give one of them.")
    if sets and not topology:
      raise CommandError(f"--flags {args.flags}: these flags are the TPU compiler's. Give compile_topology.")
    argv = args.maxtext_args
    if sets:
      argv = run_config.with_keys(argv, {flags.KEY: flags.joined(given.get(flags.KEY) or "", sets)})
    arguments = {name: variants.arguments(name, argv, on_cpu=devices is not None) for name in names}
    slices = refusals.integer(given, "compile_topology_num_slices")
  except REFUSALS as error:
    raise CommandError(str(error)) from error
  on_tpu = f"{slices} slices of {topology}" if slices > 1 else topology
  return devices, on_tpu if devices is None else f"{devices} virtual CPU devices", arguments


def _row(name: str, arguments: list[str], devices: int | None, bounds: Any, args: argparse.Namespace) -> dict[str, Any]:
  from maxtext_pp_ext.compiled import compare  # pylint: disable=import-outside-toplevel
  from maxtext_pp_ext.host.models import run_config, train_step  # pylint: disable=import-outside-toplevel
  from maxtext_pp_ext.plan import chips  # pylint: disable=import-outside-toplevel

  topology = run_config.given_keys(args.maxtext_args).get("compile_topology", "")
  with output.progress(f"compiling {name}") as shown:
    figures = compare.figures(
        arguments,
        bounds=bounds,
        batch=train_step.BATCH,
        optimizer=train_step.OPTIMIZER,
        cpu_devices=devices,
        chip=chips.of_topology(topology) if devices is None else None,
        trace_file=_of_implementation(args.trace, name),
        picture_file=_of_implementation(args.picture, name),
        on_tick=lambda _, memory: shown.say(compiling.memory_text(memory, bounds.memory_bytes)),
    )
  return {"arguments": arguments, **figures}


def _of_implementation(file: pathlib.Path | None, name: str) -> pathlib.Path | None:
  """`step-circular_bsw.json.gz` for `step.json.gz`."""
  if file is None:
    return None
  stem, dot, suffixes = file.name.partition(".")
  return file.with_name(f"{stem}-{name}{dot}{suffixes}")


def _run(arguments: dict[str, list[str]], devices: int, rounds: int, bounds: Any) -> dict[str, Any]:
  from maxtext_pp_ext.compiled.measured import step_times  # pylint: disable=import-outside-toplevel

  with output.progress("running") as shown:
    return step_times.step_times(
        arguments,
        rounds=rounds,
        bounds=bounds,
        cpu_devices=devices,
        on_tick=lambda doing, memory: shown.say(f"{doing}, {compiling.memory_text(memory, bounds.memory_bytes)}"),
    )


def _run_failures(found: dict[str, Any]) -> dict[str, str]:
  """Returns implementation -> why its step was not run; or "--run" -> why none was."""
  ran = {"--run": found, **found["implementations"]}
  return {name: row["run"]["failure"] for name, row in ran.items() if "failure" in row.get("run", {})}


def _versions() -> dict[str, str]:
  from maxtext_pp_ext.compiled import step  # pylint: disable=import-outside-toplevel

  return step.versions()


def _print(found: dict[str, Any]) -> None:
  from rich import box, console, table, text  # pylint: disable=import-outside-toplevel

  screen = console.Console(width=None if sys.stdout.isatty() else 160, highlight=False)
  versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
  screen.print(text.Text(f"{found['devices']}, per device and step ({versions})"))
  for name, text_ in found.get("flags", {}).items():
    screen.print(text.Text(f"with {name}: {text_}"))
  computed = {name: row for name, row in found["implementations"].items() if "failure" not in row}
  if computed:
    shown = table.Table(box=box.HORIZONTALS)
    shown.add_column("")
    for name in computed:
      shown.add_column(text.Text(name), justify="right")
    for label, cells in (*_lines(list(computed.values())), *_time_lines(list(computed.values()), found.get("run"))):
      if cells is None:
        shown.add_section()
      else:
        shown.add_row(text.Text(label), *map(text.Text, cells))
    screen.print(shown)
  if any("projection" in row for row in computed.values()):
    screen.print(text.Text("* from the compiler's own estimates; nothing was measured (docs/seconds.md)"))
  for name, row in computed.items():
    if unknown := row.get("projection", {}).get("unknown"):
      screen.print(text.Text(f"{name}: the projection could not follow {', '.join(unknown)}"))
  if found.get("run", {}).get("base"):
    note = (
        "Times are of virtual devices, whose transfers are copies in memory: they say which step computes or copies more."
    )
    screen.print(text.Text(note))
  for name, row in found["implementations"].items():
    if "failure" in row:
      word = "refused" if row.get("refused") else "not computed"
      screen.print(text.Text(f"{name}: {word}: {row['failure']}"))
  for name, failure in _run_failures(found).items():
    screen.print(text.Text(f"{name}: not run: {failure}"))


def _lines(rows: list[dict[str, Any]]):
  """Yields (label, a cell for each row); cells None stand for a rule."""
  from maxtext_pp_ext.compiled import carried, compare  # pylint: disable=import-outside-toplevel

  size = lambda value: "–" if value is None else units.bytes_text(value)
  for key, label in (("peak", "memory: peak"), ("temp", "temp"), ("arguments", "arguments")):
    yield label, [size(row["bytes"][key]) for row in rows]
  yield "", None
  yield "sent in all", [size(compare.wire_bytes(row)) for row in rows]
  kinds = [*_KINDS, *sorted({each["kind"] for row in rows for each in row["transfers"]} - set(_KINDS))]
  yield from _chosen(rows, "kind", kinds, "")
  yield "", None
  yield from _chosen(rows, "carries", (*carried.CARRIED, compare.UNTOLD), "carries ")
  yield "", None
  depths = sorted({each["loop_depth"] for row in rows for each in row["transfers"]})
  labels = {depth: f"in {depth} loop{'s' * (depth != 1)}" for depth in depths}
  yield from _chosen(rows, "loop_depth", depths, "", labels)
  yield "", None
  share = lambda value: "–" if value is None else f"{value:.0%}"
  yield "overlap", [share(row["overlap"]["compute_meanwhile"]) for row in rows]
  yield "dot FLOPs", [f"{row['dot_flops']:.4g}" for row in rows]
  if any("projection" in row for row in rows):
    yield "", None
    yield from _projected([row.get("projection") for row in rows])
    yield "", None
  yield "compile seconds (of all processors)", [f"{row['compile_s']} ({row['compile_cpu_s']})" for row in rows]
  if any(row["loops_without_trip_count"] for row in rows):
    yield "loops counted once, trips unknown", [str(len(row["loops_without_trip_count"])) for row in rows]


def _projected(found: list[dict[str, Any] | None]):
  """The projected step, what its time goes to, and what it comes to."""
  from maxtext_pp_ext.compiled.projection import costs  # pylint: disable=import-outside-toplevel

  cells = lambda text: ["–" if each is None else text(each) for each in found]
  seconds = lambda value: f"{value:.3g}" if value else "–"
  yield "step, projected seconds*", cells(lambda each: f"{each['step_s']:.4g}")
  for part in costs.COMPUTED:
    yield f"  {part}", cells(lambda each, part=part: seconds(each["parts"].get(part, 0)))
  sums = [{} if each is None else each["parts"] for each in found]
  waits = dict.fromkeys(part for parts in sums for part in parts if part not in costs.COMPUTED)
  for part in sorted(waits, key=lambda part: -max(parts.get(part, 0.0) for parts in sums)):
    if any(each and each["parts"].get(part, 0) >= 0.001 * each["step_s"] for each in found):
      yield f"  {part}", cells(lambda each, part=part: seconds(each["parts"].get(part, 0)))
  yield "of the compute, bubbles", cells(lambda each: seconds(each["bubbles_s"]))
  yield "of the compute, again", cells(lambda each: seconds(each["again_s"]))
  yield "tokens per second and device", cells(lambda each: f"{each['tokens_per_s']:.0f}")
  yield "TFLOP/s per device, MFU", cells(lambda each: f"{each['tflops_per_s']:.0f}, {each['mfu']:.1%}")


def _time_lines(rows: list[dict[str, Any]], run_: dict[str, Any] | None):
  """Yields the same for the steps that were run."""
  if run_ is None or run_.get("base") is None:
    return
  ratio = "{median:.3f}× ({lower_quartile:.3f}–{upper_quartile:.3f})"
  yield "", None
  of_step = lambda text: ["–" if "failure" in row["run"] else text(row["run"]) for row in rows]
  yield f"seconds a step here, {run_['rounds']} rounds", of_step(lambda each: f"{each['median_s']:.3g}")
  yield f"ratio to {run_['base']} (middle half)", of_step(lambda each: ratio.format(**each["ratio"]))


def _chosen(rows: list[dict[str, Any]], key: str, values: Any, prefix: str, labels: Any = None):
  """Yields bytes and counts of the transfers, for each value that occurs."""
  from maxtext_pp_ext.compiled import compare  # pylint: disable=import-outside-toplevel

  for value in values:
    counts = [sum(each["count"] for each in row["transfers"] if each[key] == value) for row in rows]
    if any(counts):
      cells = [
          f"{units.bytes_text(compare.wire_bytes(row, **{key: value}))} ×{count}" if count else "–"
          for row, count in zip(rows, counts, strict=True)
      ]
      yield f"{prefix}{(labels or {}).get(value, value)}", cells

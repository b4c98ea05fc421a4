# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Compiles one run's train step with several pipelines, and with none, and compares the compiled programs.

  maxtext-pp compare my.yml compile_topology=v5p-256 ici_pipeline_parallelism=4 --impl none,host,circular_bsw

It compiles for the TPUs of compile_topology, which need not be present. Without that key it compiles for virtual CPU
devices, or for the devices of --run. Figures are per device and step. "none" is the same model without a pipeline, with
its stages' devices given to FSDP. "window" is that model with circular_bsw, whose window slides over the layers
(docs/window.md). "host-bsw" and "host-ag-once" are MaxText's pipeline_fsdp_ag_per_repeat and pipeline_fsdp_ag_once.
"host-prefetch" is "none" with prefetch_fsdp_weights, where this MaxText has it.

  peak      what must fit into a device's memory at once, arguments included. A step that does not fit into the TPU's
            is not compiled, and its row says so. The CPU compiler does not report it. None is shown where activations are
            offloaded to the host: the compiler would count the host's memory, too.
  temp      temporary buffers, counted without reuse of each other's memory
  payload   what collectives send, inferred from where the program takes their data from and uses them
  overlap   share of the bytes with a matrix multiplication or kernel between start and end of the transfer; a CPU's
            transfers are synchronous
  FLOPs     of matrix multiplications; those within TPU kernels are not counted
  step      projected seconds, and what they go to: products, TPU kernels, other compute, exposed transfers. Of
            the compute, bubbles are what stages compute while they idle, and rematerialisation is what backward computes
            again. A projection from the compiler's estimate of cycles and the bandwidth of links, not a measurement. MFU
            is MaxText's own count of FLOPs by the chip's peak

All of --impl are judged first. If one is refused, nothing is compiled; without --impl it is a row that says why.

--flags adds sets of XLA flags, most of them MaxText's own, to compile_xla_flags, for all implementations alike. --without
leaves flags of these out, such as xla_sc_disjoint_spmem, which libtpu 0.0.48.1 lacks. --flags best tries the sets for
each implementation: each alone, then the best with others that alone made the step faster, up to three. It compiles each
step about 20 times. Rows are those of the best, and the default flags' seconds stand beside them.

--trace writes the projected step for ui.perfetto.dev, --picture draws an iteration of each direction of it.

--run also trains, on the devices that JAX has here: TPUs, GPUs, or virtual CPU devices where it has no others or with
--devices. They have to be those of one process. MaxText's step with its optimizer runs on a synthetic batch.
Implementations A, B, C take turns as A B C C B A. Each turn is a process of its own, which compiles or loads the step,
builds its state, runs two steps unmeasured, then half of the rounds, and gives the memory back. The table has medians,
and in brackets the lower and upper quartile. A ratio compares a step with the first of --impl that ran, round by round.
Memory in use is the peak of the fullest device, where devices report it. On TPUs whose rates are known, the measured step
stands beside the projected one. Transfers between virtual devices are copies in memory, and all share this machine's
cores: their times show whether a step computes or copies more than another, not how long it would take on TPUs.

--result writes all of it into one file: versions, devices, arguments, flags, every round, memory, projection.
"""

import argparse
import dataclasses
import importlib
import os
import pathlib
from typing import Any

import maxtext_pp_ext
from maxtext_pp_ext.cli import maxtext, output
from maxtext_pp_ext.cli.errors import CommandError, FAILED, refusing
from maxtext_pp_ext.cli.tables import compare as compare_table
from maxtext_pp_ext.compiled import best_flags, child, flags, step_times
from maxtext_pp_ext.hardware import chips
from maxtext_pp_ext.host.models import run_config, variants

_DEFAULT = "none,host,circular,circular_bsw,circular_ag_once"
_MOST_CPU_DEVICES = 4096
_ROUNDS = 10
_PICTURES = (".svg", ".png")


def add_arguments(parser: argparse.ArgumentParser) -> None:
  names: dict[str, Any] = {"type": maxtext.listed, "metavar": "NAME,…"}
  file: dict[str, Any] = {"type": pathlib.Path, "metavar": "FILE"}
  number: dict[str, Any] = {"type": int, "metavar": "N"}
  add = parser.add_argument
  add("--impl", **names, help=f"implementations (default: {_DEFAULT}, without those refused)")
  add("--devices", **number, help="virtual CPU devices, without compile_topology (default: 8)")
  add("--flags", default="", **names, help="sets of XLA flags of MaxText's, such as DENSE_VMEM_LIMIT_FLAG; or best")
  add("--without", default=[], **names, help="flags of these sets to leave out, such as xla_sc_disjoint_spmem")
  add("--run", action="store_true", help="also run the steps, on the devices here, and compare their times")
  add("--rounds", **number, help=f"rounds of --run that are measured (default: {_ROUNDS})")
  maxtext.add_network(parser)
  maxtext.add_bounds(parser, "each, and for each turn of --run")
  add("--result", **file, help="write what --json prints into a .json file")
  add("--output", **file, help="draw bars into an .svg or .png file")
  add("--trace", **file, help="write the projected step into a .json.gz file for each --impl")
  add("--picture", **file, help="draw an iteration of it into an .svg or .png file for each --impl")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
  """What is compiled, and for what."""

  devices: child.Devices  # for which the steps are compiled, and on which they run; None for a TPU topology
  described: str  # the devices in words
  chip: chips.Chip | None = None  # of the devices, for projections; None if its rates are not known
  # What was found on this machine (`compiled.tasks.devices`); None unless it is used.
  machine: dict[str, Any] | None = None
  arguments: dict[str, list[str]]  # implementation -> MaxText's arguments


def run(args: argparse.Namespace) -> int:
  names = maxtext.listed(_DEFAULT) if args.impl is None else args.impl
  _check(args, names)
  maxtext.check_given(args.maxtext_args)
  maxtext.check_arguments(args.maxtext_args)
  machine = child.Machine(os.environ.get("JAX_PLATFORMS"))  # as it is before `prepare`
  maxtext.prepare()
  with output.working("reading the config"):
    target = _target(args, names, machine)
    refused = _refused(target, args.impl is not None)
  rows = {name: refused.get(name) or _row(name, target, args) for name in names}
  versions = {"maxtext_pp_ext": maxtext_pp_ext.__version__, **child.versions()}
  found: dict[str, Any] = {"devices": target.described, "versions": versions, "given": args.maxtext_args}
  found |= {"machine": target.machine} if target.machine else {}
  used = dict.fromkeys(name for row in rows.values() for name in row.get("flags", _sets(args)))
  found |= {"flags": {name: flags.text(name, args.without) for name in used}} if used else {}
  found["implementations"] = rows
  computed = [name for name, row in rows.items() if "failure" not in row]
  compiled = [name for name, row in rows.items() if name in computed or row.get("unread")]
  if args.run and compiled:
    found["run"] = _run({name: rows[name]["arguments"] for name in compiled}, target, args)
    for name, ran in found["run"].pop("steps").items():
      rows[name]["run"] = ran
      if "step_s" in ran and "projection" in rows[name]:
        ran["of_projection"] = ran["step_s"]["median"] / rows[name]["projection"]["step_s"]
  if args.result:
    args.result.write_text(output.json_text(found), encoding="utf-8")
  if args.output and computed:
    from maxtext_pp_ext.compiled import bars  # pylint: disable=import-outside-toplevel

    bars.draw(rows, args.output, target.described)
  output.print_result(found, args.json, compare_table.show)
  late = args.impl is not None and any(row.get("refused") for row in rows.values())  # refused by what traces the step
  return 0 if computed and not compare_table.not_run(rows) and not late else FAILED


def _is_search(args: argparse.Namespace) -> bool:
  return args.flags == [best_flags.BEST]


def _sets(args: argparse.Namespace) -> list[str]:
  """The sets of flags that all implementations get."""
  return [] if _is_search(args) else args.flags


def _check(args: argparse.Namespace, names: list[str]) -> None:
  maxtext.check_names("--impl", names, variants.names())
  if best_flags.BEST in args.flags and len(args.flags) > 1:
    raise CommandError(
        f"--flags {','.join(args.flags)}: {best_flags.BEST} tries all sets. Give {best_flags.BEST}, or sets."
    )
  if args.without and not _sets(args):
    raise CommandError(f"--without {','.join(args.without)}: needs sets of --flags, from which it is left out.")
  with refusing():
    flags.joined("", _sets(args), args.without)
  suffixes = {"output": _PICTURES, "picture": _PICTURES, "trace": (".json.gz",), "result": (".json",)}
  for option, endings in suffixes.items():
    if file := getattr(args, option):
      maxtext.check_output(f"--{option}", file, endings)
  numbers = {"--minutes": args.minutes, "--memory-gib": args.memory_gib, "--rounds": args.rounds}
  maxtext.check_numbers(numbers | {"--dcn-gbps": args.dcn_gbps})
  maxtext.check_numbers({"--devices": args.devices}, most=_MOST_CPU_DEVICES)
  if args.rounds is not None and not args.run:
    raise CommandError(f"--rounds {args.rounds}: needs --run.")
  # A missing package is reported before hours of compiling.
  for package in (["matplotlib"] if args.output or args.picture else []) + ([] if args.json else ["rich"]):
    importlib.import_module(package)


def _target(args: argparse.Namespace, names: list[str], machine: child.Machine) -> Target:
  given = run_config.given_keys(args.maxtext_args)
  topology = given.get("compile_topology", "")
  if topology and args.devices:
    raise CommandError(f"--devices is for CPU devices, and compile_topology={topology} for TPUs: give one of them.")
  if topology and args.run:
    raise CommandError(
        f"--run runs on the devices that are here, and compile_topology={topology} compiles for TPUs that need not be: "
        "give one of them."
    )
  here = _machine(machine, args) if args.run and not args.devices else None
  platform = here["platform"] if here else "tpu" if topology else "cpu"
  if args.flags and platform != "tpu":
    raise CommandError(
        f"--flags {','.join(args.flags)}: these flags are the TPU compiler's, and it would compile for "
        f"{platform.upper()}s. Give compile_topology, or --run on TPUs."
    )
  devices, described, chip = _devices(args, given, machine, here)
  if (args.trace or args.picture or _is_search(args)) and chip is None:
    raise CommandError(
        f"--trace, --picture and --flags {best_flags.BEST} need a projection, which is for TPUs "
        f"{', '.join(chips.CHIPS)}, not {described}."
    )
  if args.dcn_gbps and chip is None:
    raise CommandError(f"--dcn-gbps {args.dcn_gbps:g} needs a projection, which is for TPUs, not {described}.")
  chip = maxtext.with_network(chip, args, None if here else given)
  argv = args.maxtext_args
  value = flags.joined(given.get(flags.KEY) or "", _sets(args), args.without) if args.flags else ""
  if value:
    argv = run_config.with_keys(argv, {flags.KEY: value})
  # On devices that are here, MaxText itself chooses what depends on them.
  for_platform = None if here else platform
  arguments = {name: variants.arguments(name, argv, platform=for_platform) for name in names}
  return Target(devices=devices, described=described, chip=chip, machine=here, arguments=arguments)


def _devices(
    args: argparse.Namespace, given: dict[str, Any], machine: child.Machine, here: dict[str, Any] | None
) -> tuple[child.Devices, str, chips.Chip | None]:
  """Returns `devices`, `described` and `chip` of the target."""
  if here:
    described = ", ".join(f"{count} × {kind}" for kind, count in here["kinds"].items())
    return machine, described, chips.of_device_kind(next(iter(here["kinds"])))
  if topology := given.get("compile_topology"):
    slices = run_config.integer(given, "compile_topology_num_slices")
    return None, f"{slices} slices of {topology}" if slices > 1 else topology, chips.of_topology(topology)
  count = args.devices or 8
  return count, f"{count} virtual CPU devices", None


def _refused(target: Target, asked: bool) -> dict[str, dict[str, Any]]:
  """Returns a row for each implementation that is refused.

  Raises CommandError if all are, or one is that `--impl` asks for. Nothing was compiled.
  """
  from maxtext_pp_ext.plan import check  # pylint: disable=import-outside-toplevel

  devices = target.machine["count"] if target.machine else target.devices
  count = devices if isinstance(devices, int) else None
  checked = {name: check.check(argv, count, files=False).errors for name, argv in target.arguments.items()}
  found = {name: errors for name, errors in checked.items() if errors}
  if found and (asked or len(found) == len(checked)):
    texts = [f"{name} is refused:\n" + "\n".join(f"  - {error}" for error in errors) for name, errors in found.items()]
    others = [name for name in checked if name not in found]
    texts += [f"For the others, give --impl {','.join(others)}."] if others else []
    raise CommandError("\n".join(texts))
  return {
      name: {"arguments": target.arguments[name], "failure": "\n".join(errors), "refused": True}
      for name, errors in found.items()
  }


def _machine(machine: child.Machine, args: argparse.Namespace) -> dict[str, Any] | None:
  """Returns what `compiled.tasks.devices` finds; None if it is CPUs, in whose place virtual devices are used."""
  if machine.platforms == "cpu":
    return None
  found = machine.devices(maxtext.bounds(args))
  if "failure" in found:
    raise CommandError(
        f"--run: JAX found no devices: {found['failure']}. Make them free, or give --devices N for virtual CPU devices.",
        FAILED,
    )
  if found["processes"] > 1:
    raise CommandError(
        f"--run: the {found['count']} devices belong to {found['processes']} processes, and it runs on those of one. "
        "Start it on a machine that has all devices of its slice."
    )
  return None if found["platform"] == "cpu" else found


def _row(name: str, target: Target, args: argparse.Namespace) -> dict[str, Any]:
  files = {f"{option}_file": _of_implementation(getattr(args, option), name) for option in ("trace", "picture")}
  argv = target.arguments[name]
  if not _is_search(args):
    return _compiled(name, argv, target, args, files)

  def compiled(given: best_flags.Flags, **files_of_step: pathlib.Path | None) -> dict[str, Any]:
    label = f"{name} with {', '.join(given.sets)}" if given.sets else name
    with_flags = run_config.with_keys(argv, {flags.KEY: given.value}) if given.sets else argv
    return _compiled(label, with_flags, target, args, files_of_step)

  best, tried = best_flags.search(compiled, run_config.given_keys(argv).get(flags.KEY) or "")
  found = compiled(best.flags, **files) if any(files.values()) else best.figures
  return found | {"flags": best.flags.sets, "tried": [_result(each) for each in tried]}


def _result(tried: best_flags.Tried) -> dict[str, Any]:
  failure = tried.figures.get("failure")
  ending = {"step_s": tried.seconds} if failure is None else {"failure": failure}
  return {"flags": tried.flags.sets, "without": tried.flags.without, **ending}


def _compiled(
    label: str, argv: list[str], target: Target, args: argparse.Namespace, files: dict[str, pathlib.Path | None]
) -> dict[str, Any]:
  return {"arguments": argv, **maxtext.compiled(label, argv, args, devices=target.devices, chip=target.chip, **files)}


def _of_implementation(file: pathlib.Path | None, name: str) -> pathlib.Path | None:
  """`step-circular_bsw.json.gz` for `step.json.gz`."""
  if file is None:
    return None
  stem, dot, suffixes = file.name.partition(".")
  return file.with_name(f"{stem}-{name}{dot}{suffixes}")


def _run(arguments: dict[str, list[str]], target: Target, args: argparse.Namespace) -> dict[str, Any]:
  with output.progress("running") as shown:

    def on_tick(doing: str, memory: int) -> None:
      shown.detail = f"{doing}, {maxtext.memory_text(memory, args)}"

    return step_times.step_times(
        arguments,
        rounds=args.rounds or _ROUNDS,
        bounds=maxtext.bounds(args),
        devices=target.devices,  # type: ignore[arg-type]  # not None, since --run and a topology exclude each other
        on_tick=on_tick,
    )

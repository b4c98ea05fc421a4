# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Prepares MaxText for a command: without accelerators and start-up output. Options of commands that compile."""

import argparse
from collections.abc import Iterator, Mapping, Sequence
import contextlib
import gc
import math
import os
import pathlib
from typing import Any

import maxtext_pp_ext
from maxtext_pp_ext import lazy_imports
from maxtext_pp_ext.cli import output
from maxtext_pp_ext.cli.errors import CommandError
from maxtext_pp_ext.compiled import limits
from maxtext_pp_ext.hardware import chips
from maxtext_pp_ext.host import arguments, postponed
from maxtext_pp_ext.host.models import run_config
from maxtext_pp_ext.nearest import did_you_mean


def prepare() -> None:
  """Connects this package with MaxText; JAX then uses no accelerator, and MaxText no Google Cloud.

  Must be called before JAX or MaxText is imported.
  """
  os.environ["JAX_PLATFORMS"] = "cpu"
  _set_environment()
  lazy_imports.postpone(postponed.MODULES, postponed.HOMES)
  # Python's own thresholds spend a fifth of a command's seconds on looking through what imports and models keep anyway.
  gc.set_threshold(200_000, 50, 50)
  maxtext_pp_ext.install()


def _set_environment() -> None:
  # Before MaxText is imported, which sets what is unset.
  os.environ.setdefault("DECOUPLE_GCLOUD", "TRUE")
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
  # Before NumPy is imported. The products of a plan are small, and OpenBLAS's other threads wait for the next one by
  # spinning: a quarter of the CPU seconds of two cores.
  os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


@contextlib.contextmanager
def imported(then: str) -> Iterator[output.Progress]:
  """Prepares and imports MaxText for what is done in the context, which `then` names; see `output.working`."""
  prepare()
  with output.working("importing MaxText") as shown:
    postponed.import_maxtext()
    shown.text = then
    yield shown


def problems(maxtext_args: Sequence[str]) -> list[str]:
  """Returns a sentence for each name that does not exist (`host.arguments`), without importing MaxText.

  Raises CommandError if these do not have the form of MaxText's arguments: optionally a .yml file, then key=value.
  """
  for i, argument in enumerate(maxtext_args):
    if argument.endswith(".yml") and not i:
      if not os.path.isfile(arguments.yml_file(argument)):
        raise CommandError(f"{argument} is a folder." if os.path.isdir(argument) else f"There is no file {argument}.")
    elif not argument.partition("=")[0] or "=" not in argument:
      raise CommandError(f"{argument!r} is neither a leading .yml file nor key=value.")
  _set_environment()
  return arguments.problems(maxtext_args)


def check_arguments(maxtext_args: Sequence[str]) -> None:
  """Raises CommandError unless these are arguments of MaxText, with names that exist. It does not import MaxText."""
  if found := problems(maxtext_args):
    raise CommandError("\n".join(found))


def check_given(maxtext_args: Sequence[str]) -> None:
  """Raises CommandError if the arguments are none, or a file without keys: a run of MaxText's defaults is nobody's."""
  if not maxtext_args or arguments.given(maxtext_args) == {}:
    has_none = f"{maxtext_args[0]} has no keys." if maxtext_args else "Which run?"
    raise CommandError(f"{has_none} Give a .yml file with its keys, or key=value, such as model_name=llama3-8b.")


def listed(text: str) -> list[str]:
  """The type of an option that takes names, separated by commas."""
  return list(dict.fromkeys(filter(None, text.split(","))))


def check_names(option: str, names: Sequence[str], known: Sequence[str]) -> None:
  """Raises CommandError unless an option's value is a list of known names."""
  if not names:
    raise CommandError(f"{option} names nothing. Known are {', '.join(known)}.")
  for name in names:
    if name not in known:
      raise CommandError(f"{option} {name}: known are {', '.join(known)}{did_you_mean(name, known)}")


def check_output(option: str, file: pathlib.Path, suffixes: Sequence[str]) -> None:
  """Raises CommandError unless a file of this name can be written: it has one of the suffixes, and its folder exists."""
  if not file.name.endswith(tuple(suffixes)):
    raise CommandError(f"{option} {file}: the name has to end in {' or '.join(suffixes)}.")
  folder = file.absolute().parent
  if not folder.is_dir():
    raise CommandError(f"{option} {file}: there is no folder {folder}.")
  if not os.access(folder, os.W_OK):
    raise CommandError(f"{option} {file}: nothing can be written into {folder}.")


def check_numbers(given: Mapping[str, float | None], most: float = math.inf) -> None:
  """Raises CommandError unless the numbers of these options are positive, finite and at most `most`; None passes."""
  for option, value in given.items():
    if value is not None and not 0 < value < math.inf:
      raise CommandError(f"{option} {value}: has to be positive.")
    if value is not None and value > most:
      raise CommandError(f"{option} {value}: can be at most {most}.")


def add_bounds(parser: argparse.ArgumentParser, each: str = "each") -> None:
  parser.add_argument("--minutes", type=float, default=30.0, help=f"wall time for {each} (default: %(default)s)")
  parser.add_argument("--memory-gib", type=float, default=24.0, help=f"host memory for {each} (default: %(default)s)")


def add_network(parser: argparse.ArgumentParser) -> None:
  parser.add_argument(
      "--dcn-gbps",
      type=float,
      metavar="X",
      help="GB/s of a device to other slices, instead of what was measured (v6e: 4.11), or of its nominal rate",
  )


def with_network(chip: chips.Chip | None, args: argparse.Namespace, given: Mapping[str, Any] | None) -> chips.Chip | None:
  """Returns a chip with the rate of `add_network`, if it is given.

  `given` are the keys of a run for devices that need not be here. Raises CommandError if they have one slice, or if the
  chip is not known.
  """
  if args.dcn_gbps and given is not None:
    if max(run_config.integer(given, key) for key in ("num_slices", "compile_topology_num_slices")) <= 1:
      text = "one slice sends nothing to others. Give compile_topology_num_slices=."
      raise CommandError(f"--dcn-gbps {args.dcn_gbps:g}: {text}")
    if chip is None:
      raise CommandError(
          f"--dcn-gbps {args.dcn_gbps:g}: there are no seconds without the kind of the devices. Give --chip."
      )
  return chip.with_network(args.dcn_gbps * 1e9) if chip and args.dcn_gbps else chip


def bounds(args: argparse.Namespace) -> limits.Limits:
  """Returns what the options of `add_bounds` ask for."""
  return limits.Limits(seconds=args.minutes * 60, memory_bytes=int(args.memory_gib * limits.GIB))


def compiled(name: str, arguments_of_run: Sequence[str], args: argparse.Namespace, **target: Any) -> dict[str, Any]:
  """Returns the figures of a run's train step (`compare.figures`), with progress, within the bounds of `args`."""
  from maxtext_pp_ext.compiled import compare  # pylint: disable=import-outside-toplevel

  with output.progress(f"compiling {name}") as shown:

    def on_tick(_, memory: int) -> None:
      shown.detail = memory_text(memory, args)

    return compare.figures(arguments_of_run, bounds=bounds(args), on_tick=on_tick, **target)


def memory_text(memory: int, args: argparse.Namespace) -> str:
  return f"{memory / limits.GIB:.1f} GiB of {args.memory_gib:.3g}"

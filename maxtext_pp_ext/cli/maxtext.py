# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Prepares MaxText for a command: without accelerators and start-up output. Options of commands that compile."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
import gc
import math
import os
from typing import Any

import maxtext_pp_ext
from maxtext_pp_ext import lazy_imports
from maxtext_pp_ext.cli.errors import CommandError
from maxtext_pp_ext.host import postponed

_OF_MAXTEXT = "src/maxtext/configs/"
_GIB = 1 << 30


def prepare() -> None:
  """Connects this package with MaxText; JAX then uses no accelerator, and MaxText no Google Cloud.

  Must be called before JAX or MaxText is imported.
  """
  os.environ["JAX_PLATFORMS"] = "cpu"
  os.environ.setdefault("DECOUPLE_GCLOUD", "TRUE")
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
  lazy_imports.postpone(postponed.MODULES)
  # Python's own thresholds spend a fifth of a command's seconds on looking through what imports and models keep anyway.
  gc.set_threshold(200_000, 50, 50)
  maxtext_pp_ext.install()


def check_arguments(maxtext_args: Sequence[str]) -> None:
  """Raises CommandError unless these are arguments of MaxText: optionally a .yml file, then key=value."""
  for i, argument in enumerate(maxtext_args):
    if argument.endswith(".yml") and not i:
      # The places where MaxText looks for it.
      if not argument.startswith(_OF_MAXTEXT) and not any(map(os.path.isfile, (argument, os.path.join("src", argument)))):
        raise CommandError(f"There is no file {argument}.")
    elif not argument.partition("=")[0] or "=" not in argument:
      raise CommandError(f"{argument!r} is neither a leading .yml file nor key=value.")


def check_numbers(given: Mapping[str, float | None], most: float = math.inf) -> None:
  """Raises CommandError unless the numbers of these options are positive, finite and at most `most`; None passes."""
  for option, value in given.items():
    if value is None:
      continue
    if not 0 < value < math.inf:
      raise CommandError(f"{option} {value}: has to be positive.")
    if value > most:
      raise CommandError(f"{option} {value}: can be at most {most}.")


def add_bounds(parser: argparse.ArgumentParser, each: str = "each") -> None:
  parser.add_argument("--minutes", type=float, default=30.0, help=f"wall time for {each} (default: %(default)s)")
  parser.add_argument("--memory-gib", type=float, default=24.0, help=f"host memory for {each} (default: %(default)s)")


def bounds(args: argparse.Namespace) -> Any:
  """Returns the `limits.Limits` that the options ask for."""
  from maxtext_pp_ext.compiled import limits  # pylint: disable=import-outside-toplevel

  return limits.Limits(seconds=args.minutes * 60, memory_bytes=int(args.memory_gib * _GIB))


def memory_text(memory: int, limit: int) -> str:
  return f"{memory / _GIB:.1f} GiB of {limit / _GIB:.3g}"

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Prepares MaxText for a command: without accelerators, and without its start-up output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import math
import os

import maxtext_pp_ext
from maxtext_pp_ext.cli.errors import CommandError

_OF_MAXTEXT = "src/maxtext/configs/"


def prepare() -> None:
  """Connects this package with MaxText; JAX then uses no accelerator, and MaxText no Google Cloud.

  Must be called before JAX or MaxText is imported.
  """
  os.environ["JAX_PLATFORMS"] = "cpu"
  os.environ.setdefault("DECOUPLE_GCLOUD", "TRUE")
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
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

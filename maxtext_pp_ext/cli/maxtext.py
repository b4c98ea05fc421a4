# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""MaxText within a command: on a machine without accelerators, and without what it says while it starts."""

from __future__ import annotations

from collections.abc import Sequence
import os

from maxtext_pp_ext.cli.errors import CommandError


def on_cpu() -> None:
  """Has JAX use no accelerator, and MaxText no Google Cloud; to be called before either is imported."""
  os.environ["JAX_PLATFORMS"] = "cpu"
  os.environ.setdefault("DECOUPLE_GCLOUD", "TRUE")
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


def check_arguments(maxtext_args: Sequence[str]) -> None:
  """Raises CommandError unless these are arguments of MaxText: a yml file, perhaps, and key=value."""
  for i, argument in enumerate(maxtext_args):
    if "=" not in argument and (i or not argument.endswith((".yml", ".yaml"))):
      raise CommandError(f"{argument!r} is neither a yml file in front nor key=value.")

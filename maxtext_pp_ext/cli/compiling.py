# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Shared by the subcommands that compile in separate processes: options, limits, progress text."""

from __future__ import annotations

import argparse
from typing import Any

_GIB = 1 << 30


def add_arguments(parser: argparse.ArgumentParser, each: str = "each") -> None:
  parser.add_argument("--minutes", type=float, default=30.0, help=f"wall time for {each} (default: %(default)s)")
  parser.add_argument("--memory-gib", type=float, default=24.0, help=f"host memory for {each} (default: %(default)s)")


def bounds(args: argparse.Namespace) -> Any:
  """Returns the `limits.Limits` that the options ask for."""
  from maxtext_pp_ext.compiled import limits  # pylint: disable=import-outside-toplevel

  return limits.Limits(seconds=args.minutes * 60, memory_bytes=int(args.memory_gib * _GIB))


def memory_text(memory: int, limit: int) -> str:
  return f"{memory / _GIB:.1f} GiB of {limit / _GIB:.3g}"

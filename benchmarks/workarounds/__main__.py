# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tries which of the engine's workarounds for the TPU compiler the installed libtpu still needs.

  python -m benchmarks.workarounds          compiles small programs: minutes
  python -m benchmarks.workarounds --slow   and train steps of small models without a line of the engine: an hour
  python -m benchmarks.workarounds NAME     one of them

Each is compiled with a workaround and without it. A comment in the engine names each, with the libtpu that it was last
needed with. A workaround that is not needed can go if no libtpu that users may have needs it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
import importlib.metadata
import os
import sys

import jax

from benchmarks.workarounds import table
from benchmarks.workarounds.ablations import Ablation
from benchmarks.workarounds.reproducer import is_needed
from maxtext_pp_ext.compiled import child
from maxtext_pp_ext.processes import interruption


def line(name: str, libtpu: str) -> tuple[bool, str]:
  """(whether it could be tried, what came out).

  Args:
    name: of a reproducer.
    libtpu: the installed version.
  """
  reproducer = table.REPRODUCERS[name]
  where = ", ".join(str(place) for place in table.places() if place.reproducer == name)
  try:
    without, with_ = reproducer.figures()
  except RuntimeError as error:
    return False, f"{name} ({where}), libtpu {libtpu}: failed, {str(error).strip().splitlines()[0]}"
  verdict = "needed" if is_needed(without, with_, reproducer.margin) else "not needed"
  return True, f"{name} ({where}), libtpu {libtpu}: {verdict}, {without:.4g} {reproducer.unit}, {with_:.4g} with it"


def main(argv: Sequence[str] | None = None) -> int:
  parser = argparse.ArgumentParser(
      prog="python -m benchmarks.workarounds", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("names", nargs="*", metavar="NAME", help="which, also slow ones (default: all that are not slow)")
  parser.add_argument("--slow", action="store_true", help="the slow ones, too")
  options = parser.parse_args(argv)
  if unknown := [name for name in options.names if name not in table.REPRODUCERS]:
    parser.error(f"there is no {unknown[0]}. There are {', '.join(table.REPRODUCERS)}.")
  fast = [name for name, each in table.REPRODUCERS.items() if options.slow or not isinstance(each, Ablation)]
  os.environ.update(child.ENVIRONMENT | child.WITHOUT_ACCELERATORS)
  # JAX has read these variables already.
  jax.config.update("jax_platforms", "cpu")
  jax.config.update("jax_enable_compilation_cache", False)
  libtpu, failed = importlib.metadata.version("libtpu"), False
  for name in options.names or fast:
    tried, words = line(name, libtpu)
    failed = failed or not tried
    print(words, flush=True)
  return 1 if failed else 0


if __name__ == "__main__":
  sys.exit(interruption.run(main, "workarounds"))

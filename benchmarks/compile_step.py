# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Compiles one MaxText train step for a TPU topology, without a TPU, in a process of its own with limits.

`compile_step(...)` is what the benchmarks call. As a program it is the process itself:

  python -m benchmarks.compile_step RESULT.json [--hlo FILE] model_name=llama3-8b compile_topology=v5p-32 …

The memory figures are the compiler's. `peak_GB` is what has to fit into a chip at once, arguments included. `temp_GB`
sums up the temporary buffers without their reuse of one another's memory, and without arguments.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import pathlib
import re
import sys
import tempfile
import time
from typing import Any

from benchmarks import hlo
from benchmarks import limits
from benchmarks import shapes
from benchmarks import traffic
from rich import console as rich_console

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
_ENVIRONMENT = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "DECOUPLE_GCLOUD": "TRUE",
    "JAX_ENABLE_COMPILATION_CACHE": "false",  # a compile time from a cache is none
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TF_CPP_MIN_LOG_LEVEL": "2",
}


def compile_step(
    arguments: list[str],
    *,
    label: str,
    bounds: limits.Limits,
    console: rich_console.Console,
    hlo_file: pathlib.Path | None = None,
) -> dict[str, Any]:
  """Compiles in a process of its own, with a line of progress, and returns the figures, or `failure` with the reason.

  Args:
    arguments: MaxText's, without the yml, or with the name of a preset in front.
    label: for the line of progress.
    bounds: wall time and host memory.
    console: where progress goes.
    hlo_file: keeps the optimised HLO there.
  """
  with tempfile.TemporaryDirectory() as folder:
    result, log = pathlib.Path(folder) / "result.json", pathlib.Path(folder) / "log.txt"
    command = [sys.executable, "-m", "benchmarks.compile_step", str(result)]
    command += [f"--hlo={hlo_file}"] if hlo_file else []
    with console.status(label) as status:
      outcome = limits.run(
          [*command, *arguments],
          log=log,
          limits=bounds,
          environment={**os.environ, **_ENVIRONMENT, "PYTHONPATH": _python_path()},
          on_tick=lambda seconds, memory: status.update(f"{label}: {seconds:.0f} s, {memory / limits.GIB:.1f} GiB"),
      )
    if outcome.failure is None:
      figures = json.loads(result.read_text(encoding="utf-8"))
    else:
      figures = {"failure": outcome.failure}
  figures["host_memory_GiB"] = round(outcome.peak_memory_bytes / limits.GIB, 1)
  ending = outcome.failure or f"compiled in {figures['compile_s']} s"
  line = f"{label}: {ending} ({figures['host_memory_GiB']} GiB of host memory)"
  console.print(line, markup=False, highlight=False, soft_wrap=True)
  return figures


def parse(
    parser: argparse.ArgumentParser, argv: list[str] | None, *, output: str, impl: list[str], minutes: float = 30.0
) -> argparse.Namespace:
  """Parses the options that all commands have which compile train steps: what, within which limits, and where to."""
  parser.add_argument("--impl", nargs="+", type=shapes.implementation, default=impl, metavar="NAME")
  parser.add_argument("--minutes", type=float, default=minutes, help="wall time for a compilation (default: %(default)s)")
  parser.add_argument("--memory-gib", type=float, default=24.0, help="host memory for it (default: %(default)s)")
  parser.add_argument("--hlo", type=pathlib.Path, help="folder to keep the optimised HLO in")
  parser.add_argument("--output", type=pathlib.Path, default=RESULTS / output)
  options = parser.parse_args(argv)
  options.limits = limits.Limits(seconds=options.minutes * 60, memory_bytes=int(options.memory_gib * limits.GIB))
  if options.hlo:
    options.hlo.mkdir(parents=True, exist_ok=True)
  return options


def versions() -> dict[str, str]:
  """Of the packages that the figures depend on."""
  found = {}
  for name in ("maxtext", "jax", "flax", "libtpu"):
    try:
      found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
      found[name] = "not installed"
  return found


def _python_path() -> str:
  return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def main(argv: list[str]) -> None:
  """The process that compiles: writes its figures to the file named first."""
  result, arguments = pathlib.Path(argv[0]), argv[1:]
  hlo_file = None
  if arguments and (match := re.fullmatch(r"--hlo=(.+)", arguments[0])):
    hlo_file, arguments = pathlib.Path(match[1]), arguments[1:]
  # Before MaxText is imported: our keys have to be in its schema.
  import maxtext_pp_ext

  maxtext_pp_ext.install()
  compiled, times = _compile(arguments)
  text = compiled.as_text()
  if hlo_file:
    hlo_file.write_text(text, encoding="utf-8")
  memory = compiled.memory_analysis()
  peak = getattr(memory, "peak_memory_in_bytes", 0)
  figures = {
      "temp_GB": round(memory.temp_size_in_bytes / 1e9, 2),
      "peak_GB": round(peak / 1e9, 2) if peak else None,
      "arg_GB": round(memory.argument_size_in_bytes / 1e9, 2),
      **times,
      **traffic.analyse(hlo.parse(text)).to_json(),
  }
  result.write_text(json.dumps(figures), encoding="utf-8")


def _compile(arguments: list[str]) -> tuple[Any, dict[str, float]]:
  """The step that MaxText's train_compile compiles, which keeps it to itself, and the seconds that took.

  `compile_s` is wall time; `compile_cpu_s` that of all processors together, which depends less on what else they do.
  """
  import maxtext
  from maxtext_pp_ext import presets
  from maxtext.trainers.pre_train import train_compile

  caught: dict[str, Any] = {}
  original = train_compile.jit_and_compile

  def catching(*args, **kwargs):
    start, cpu_start = time.monotonic(), time.process_time()
    caught["compiled"] = original(*args, **kwargs)
    caught["times"] = {
        "compile_s": round(time.monotonic() - start, 1),
        "compile_cpu_s": round(time.process_time() - cpu_start, 1),
    }
    return caught["compiled"]

  train_compile.jit_and_compile = catching
  preset = [] if "=" in arguments[0] else [arguments.pop(0)]
  base = pathlib.Path(maxtext.__file__).parent / "configs" / "base.yml"
  train_compile.main([None, presets.path(*preset) if preset else str(base), *arguments])
  return caught["compiled"], caught["times"]


if __name__ == "__main__":
  main(sys.argv[1:])

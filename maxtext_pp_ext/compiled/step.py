# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Compiles one MaxText train step in a separate process with limits, for devices that the machine has or need not have.

Commands and benchmarks call `compile_step(...)`. The process that compiles runs this module as a program:

  python -m maxtext_pp_ext.compiled.step RESULT.json PROGRAM.hlo [--here] CONFIG.yml compile_topology=v5p-32 key=value …

The compiler reports the memory figures. `peak_GB` is the memory that a chip needs at once, arguments included; None where
activations are offloaded to the host's memory, which the compiler's peak counts, too. `temp_GB`
is the sum of the temporary buffers, as if they did not reuse one another's memory, without arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
import importlib.metadata
import json
import pathlib
import re
import sys
from typing import Any

from maxtext_pp_ext.compiled import child, limits

# Masks of attention may have millions of elements. No choice of a branch needs a table of this many characters.
_LARGE_TABLE = re.compile(r"constant\(\{[^()]{400000,}\}\)")


def compile_step(
    arguments: Sequence[str],
    *,
    bounds: limits.Limits,
    hlo_file: pathlib.Path,
    devices: child.Devices = None,
    on_tick: child.OnTick = lambda seconds, memory: None,
) -> dict[str, Any]:
  """Compiles in a separate process, writes the program, and returns what the compiler says, or `failure` and why.

  Args:
    arguments: MaxText's command-line arguments. The first, a yml file, may be left out (base.yml), or be a preset's name.
    bounds: limits of wall time and host memory.
    hlo_file: file for the optimised HLO.
    devices: those to compile for; None for the TPUs of `compile_topology`.
    on_tick: called regularly with the seconds so far and the resident bytes now.

  Returns:
    Memory per device, the seconds that compiling took, and `names`, by which the step's arguments are told apart
    (`reading.step`); for TPUs `placement` and `work`, which projections need. If there are none, `failure`; and `refused`
    if the configuration was refused.
  """
  here = ["--here"] if devices is not None else []
  return child.run(__name__, [str(hlo_file), *here, *arguments], bounds=bounds, devices=devices, on_tick=on_tick)


def versions() -> dict[str, str]:
  """The versions of the packages that the figures depend on."""
  found = {}
  for name in ("maxtext", "jax", "flax", "libtpu"):
    try:
      found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
      found[name] = "not installed"
  return found


def main(argv: list[str]) -> None:
  """The process that compiles: writes its figures and the program to the files that are its first two arguments."""
  result, hlo_file, arguments = pathlib.Path(argv[0]), pathlib.Path(argv[1]), argv[2:]
  here = arguments[:1] == ["--here"]
  arguments = arguments[1:] if here else arguments
  # Before MaxText is imported: our keys have to be in its schema.
  import maxtext_pp_ext

  maxtext_pp_ext.install()
  from maxtext_pp_ext.host.models import train_step

  try:
    compiled = train_step.compile_train_step(arguments, here=here)
  except train_step.RefusedError as error:
    figures = {"failure": str(error), "refused": True}
  else:
    platform = compiled.mesh.devices.flat[0].platform
    hlo_file.write_text(printed(compiled.program), encoding="utf-8")
    figures = _memory(compiled.program, platform) | compiled.times
    figures["names"] = {"batch": train_step.BATCH, "optimizer": train_step.OPTIMIZER}
    if platform == "tpu":
      figures |= {"placement": train_step.placement(compiled), "work": train_step.work(compiled.config)}
  result.write_text(json.dumps(figures), encoding="utf-8")


def printed(executable: Any) -> str:
  """The optimised HLO, with the tables of integers that `as_text` leaves out; projections follow what they decide."""
  from maxtext_pp_ext.jax_private import HloPrintOptions

  options = HloPrintOptions()
  options.print_large_constants = True
  (module,) = executable.runtime_executable().hlo_modules()
  return _LARGE_TABLE.sub("constant({...})", module.to_string(options))


def _memory(compiled: Any, platform: str) -> dict[str, Any]:
  memory = compiled.memory_analysis()
  # The CPU compiler's peak leaves temporary buffers out. A TPU's counts those in the host's memory, too (jaxlib 0.11.2).
  is_device_memory = platform != "cpu" and not memory.host_temp_size_in_bytes
  peak = getattr(memory, "peak_memory_in_bytes", 0) if is_device_memory else 0
  sizes = {"temp": memory.temp_size_in_bytes, "peak": peak or None, "arguments": memory.argument_size_in_bytes}
  return {
      "bytes": sizes,
      "temp_GB": round(memory.temp_size_in_bytes / 1e9, 2),
      "peak_GB": round(peak / 1e9, 2) if peak else None,
      "arg_GB": round(memory.argument_size_in_bytes / 1e9, 2),
  }


if __name__ == "__main__":
  main(sys.argv[1:])

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs `tasks`, each in its own process with limits, devices, flags and memory."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import json
import os
import pathlib
import sys
import types
from typing import Any

from maxtext_pp_ext import installed, processes
from maxtext_pp_ext.compiled import limits
from maxtext_pp_ext.processes import interruption

OnTick = Callable[[float, int], None]
ENVIRONMENT = {
    "DECOUPLE_GCLOUD": "TRUE",
    "JAX_ENABLE_COMPILATION_CACHE": "false",  # a compile time with a cache hit means nothing
    "TF_CPP_MIN_LOG_LEVEL": "2",
}
# Of a process that compiles for TPUs that are not there.
WITHOUT_ACCELERATORS = {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}


@dataclasses.dataclass(frozen=True)
class Machine:
  """The devices that JAX has on this machine."""

  platforms: str | None  # JAX_PLATFORMS of the user, which a command may have replaced for itself; None if it is not set

  def devices(self, bounds: limits.Limits) -> dict[str, Any]:
    """What `tasks.devices` finds, or `failure`."""
    return run("devices", [], bounds=bounds, devices=self)


# Virtual CPU devices, those of the machine, or none for a step of a TPU topology, which need not be there.
Devices = int | Machine | None


def run(
    task: str,
    arguments: Sequence[str],
    *,
    bounds: limits.Limits,
    devices: Devices = None,
    environment: Mapping[str, str] = types.MappingProxyType({}),
    on_tick: OnTick = lambda seconds, memory: None,
) -> dict[str, Any]:
  """Runs one of `tasks.TASKS`, in whose process JAX has these devices, or one CPU, and which has this environment, too.

  `on_tick` is called regularly with the seconds so far and the resident bytes now. Returns the task's result, or
  `failure` with the reason; and `host_memory_GiB`, the most that was resident.
  """
  variables = {**os.environ, **ENVIRONMENT, "PYTHONPATH": processes.python_path()}
  if not isinstance(devices, Machine):
    variables |= WITHOUT_ACCELERATORS
  elif devices.platforms is None:
    variables.pop("JAX_PLATFORMS", None)
  else:
    variables["JAX_PLATFORMS"] = devices.platforms
  if isinstance(devices, int):
    variables["XLA_FLAGS"] = processes.xla_flags(devices)
  with interruption.temporary_folder() as folder:
    result, log = pathlib.Path(folder) / "result.json", pathlib.Path(folder) / "log.txt"
    command = [sys.executable, "-m", f"{__package__}.tasks", task, str(result), *arguments]
    variables |= environment
    failure, peak = limits.run(command, log=log, limits=bounds, environment=variables, on_tick=on_tick)
    found = {"failure": failure} if failure else json.loads(result.read_text(encoding="utf-8"))
  return found | {"host_memory_GiB": round(peak / limits.GIB, 1)}


def compile_step(
    arguments: Sequence[str],
    *,
    bounds: limits.Limits,
    hlo_file: pathlib.Path,
    devices: Devices = None,
    on_tick: OnTick = lambda seconds, memory: None,
) -> dict[str, Any]:
  """Compiles in a separate process, writes the program, and returns what the compiler says, or `failure` and why.

  Args:
    arguments: MaxText's command-line arguments. The first, a yml file, may be left out (base.yml), or be a preset's name.
    bounds: limits of wall time and host memory.
    hlo_file: file for the optimised HLO.
    devices: those to compile for; None for the TPUs of `compile_topology`.
    on_tick: see `run`.

  Returns:
    `bytes` of memory per device. `peak_GB` is what a chip needs at once, arguments included; None where activations are
    offloaded to the host's memory, which the compiler's peak counts, too. `temp_GB` is the sum of the temporary buffers,
    as if they did not reuse one another's memory, without arguments. The seconds that compiling took. `names`, by which
    the step's arguments are told apart (`reading.step`). For TPUs `placement` and `work`, which projections need. If
    there are none, `failure`; and `refused` if the configuration was refused.
  """
  where = "here" if devices is not None else "topology"
  return run("compile_step", [str(hlo_file), where, *arguments], bounds=bounds, devices=devices, on_tick=on_tick)


def versions() -> dict[str, str]:
  """The versions of the packages that the figures depend on."""
  return {name: installed.version(name) or "not installed" for name in ("maxtext", "jax", "flax", "libtpu")}

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs modules of this folder as programs, each in its own process with limits, devices, flags and memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import json
import os
import pathlib
import sys
import types
from typing import Any

from maxtext_pp_ext import processes
from maxtext_pp_ext.compiled import limits
from maxtext_pp_ext.processes import interruption

OnTick = Callable[[float, int], None]
_ENVIRONMENT = {
    "DECOUPLE_GCLOUD": "TRUE",
    "JAX_ENABLE_COMPILATION_CACHE": "false",  # a compile time with a cache hit means nothing
    "TF_CPP_MIN_LOG_LEVEL": "2",
}
_WITHOUT_ACCELERATORS = {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}


@dataclasses.dataclass(frozen=True)
class Machine:
  """The devices that JAX has on this machine."""

  platforms: str | None  # JAX_PLATFORMS of the user, which a command may have replaced for itself; None if it is not set


# Virtual CPU devices, those of the machine, or none for a step of a TPU topology, which need not be there.
Devices = int | Machine | None


def run(
    module: str,
    arguments: Sequence[str],
    *,
    bounds: limits.Limits,
    devices: Devices = None,
    environment: Mapping[str, str] = types.MappingProxyType({}),
    on_tick: OnTick = lambda seconds, memory: None,
) -> dict[str, Any]:
  """Runs a module and returns its result, or `failure` with the reason.

  Args:
    module: full name of the module. Its program gets the name of a file, then `arguments`. It writes a JSON object into
      that file, to which `host_memory_GiB` is added, the largest resident memory seen.
    arguments: the program's further arguments.
    bounds: limits of wall time and host memory.
    devices: those that JAX has in the process; None for one CPU.
    environment: further environment variables.
    on_tick: called regularly with the seconds so far and the resident bytes now.
  """
  variables = {**os.environ, **_ENVIRONMENT, "PYTHONPATH": processes.python_path()}
  if isinstance(devices, Machine):
    variables.pop("JAX_PLATFORMS", None)
    variables |= {} if devices.platforms is None else {"JAX_PLATFORMS": devices.platforms}
  else:
    variables |= _WITHOUT_ACCELERATORS
  if isinstance(devices, int):
    variables["XLA_FLAGS"] = processes.xla_flags(devices)
  with interruption.temporary_folder() as folder:
    result, log = pathlib.Path(folder) / "result.json", pathlib.Path(folder) / "log.txt"
    command = [sys.executable, "-m", module, str(result), *arguments]
    outcome = limits.run(command, log=log, limits=bounds, environment={**variables, **environment}, on_tick=on_tick)
    found = {"failure": outcome.failure} if outcome.failure else json.loads(result.read_text(encoding="utf-8"))
  return found | {"host_memory_GiB": round(outcome.peak_memory_bytes / limits.GIB, 1)}

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs modules of this folder as programs, each in its own process with limits, devices, flags and memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import json
import os
import pathlib
import sys
from typing import Any

from maxtext_pp_ext import processes
from maxtext_pp_ext.compiled import limits
from maxtext_pp_ext.processes import interruption

OnTick = Callable[[float, int], None]
_ENVIRONMENT = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "DECOUPLE_GCLOUD": "TRUE",
    "JAX_ENABLE_COMPILATION_CACHE": "false",  # a compile time with a cache hit means nothing
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TF_CPP_MIN_LOG_LEVEL": "2",
}


def run(
    module: str,
    arguments: Sequence[str],
    *,
    bounds: limits.Limits,
    cpu_devices: int | None = None,
    on_tick: OnTick = lambda seconds, memory: None,
) -> dict[str, Any]:
  """Runs a module and returns its result, or `failure` with the reason.

  Args:
    module: full name of the module. Its program gets the name of a file, then `arguments`. It writes a JSON object into
      that file.
    arguments: the program's further arguments.
    bounds: limits of wall time and host memory.
    cpu_devices: number of virtual CPU devices; None leaves XLA_FLAGS as they are.
    on_tick: called regularly with the seconds so far and the resident bytes now.

  Returns:
    The JSON object, with `host_memory_GiB`, the largest resident memory seen.
  """
  environment = {**os.environ, **_ENVIRONMENT, "PYTHONPATH": processes.python_path()}
  if cpu_devices is not None:
    environment["XLA_FLAGS"] = processes.xla_flags(cpu_devices)
  with interruption.temporary_folder() as folder:
    result, log = pathlib.Path(folder) / "result.json", pathlib.Path(folder) / "log.txt"
    command = [sys.executable, "-m", module, str(result), *arguments]
    outcome = limits.run(command, log=log, limits=bounds, environment=environment, on_tick=on_tick)
    found = {"failure": outcome.failure} if outcome.failure else json.loads(result.read_text(encoding="utf-8"))
  return found | {"host_memory_GiB": round(outcome.peak_memory_bytes / limits.GIB, 1)}

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Processes of our own: what they need in their environment, and how they end. Nothing here imports JAX or MaxText.

`children` starts them, each beside a `guardian` that ends them with their parent; `interruption` is for their parent, a
command that gets a signal.
"""

import os
import pathlib

DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"
# XLA ends the process if its devices do not all come to a collective within a limit, which may be on a busy machine.
_PATIENCE = "--xla_cpu_collective_call_terminate_timeout_seconds=600"


def python_path() -> str:
  """PYTHONPATH with this package first, also where it is a checkout that is not installed."""
  own = str(pathlib.Path(__file__).resolve().parents[2])
  return os.pathsep.join(filter(None, [own, os.environ.get("PYTHONPATH")]))


def xla_flags(devices: int) -> str:
  """XLA_FLAGS with so many virtual CPU devices, which wait for each other, and this process's other flags."""
  flags = os.environ.get("XLA_FLAGS", "").split()
  kept = [flag for flag in flags if flag != _PATIENCE and flag.split("=")[0] != DEVICE_COUNT_FLAG]
  return " ".join([_PATIENCE, *kept, f"{DEVICE_COUNT_FLAG}={devices}"])  # of two values XLA takes the last

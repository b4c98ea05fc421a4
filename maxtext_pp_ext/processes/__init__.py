# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Starts our own processes: their environment, and how they end. Nothing here imports JAX or MaxText."""

import os
import pathlib

DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"
# XLA ends the process if not all of its devices reach a collective in time, which may happen on a busy machine.
_PATIENCE = "--xla_cpu_collective_call_terminate_timeout_seconds=600"


def python_path() -> str:
  """Returns PYTHONPATH with this package first, also for a checkout that is not installed."""
  own = str(pathlib.Path(__file__).resolve().parents[2])
  return os.pathsep.join(filter(None, [own, os.environ.get("PYTHONPATH")]))


def xla_flags(devices: int) -> str:
  """Returns XLA_FLAGS with this many virtual CPU devices, patient collectives, and this process's other flags."""
  flags = os.environ.get("XLA_FLAGS", "").split()
  kept = [flag for flag in flags if flag != _PATIENCE and flag.split("=")[0] != DEVICE_COUNT_FLAG]
  return " ".join([_PATIENCE, *kept, f"{DEVICE_COUNT_FLAG}={devices}"])  # XLA takes the last of two values

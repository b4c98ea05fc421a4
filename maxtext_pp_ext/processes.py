# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""What a process of its own needs in its environment; imports neither JAX nor MaxText."""

import os
import pathlib

DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"


def python_path() -> str:
  """PYTHONPATH with this package first, also where it is a checkout that is not installed."""
  own = str(pathlib.Path(__file__).resolve().parents[1])
  return os.pathsep.join(filter(None, [own, os.environ.get("PYTHONPATH")]))


def xla_flags(devices: int) -> str:
  """XLA_FLAGS with so many virtual CPU devices, and this process's other flags."""
  kept = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if flag.split("=")[0] != DEVICE_COUNT_FLAG]
  return " ".join([*kept, f"{DEVICE_COUNT_FLAG}={devices}"])

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Which devices JAX has on this machine. Asked in a process of its own, which gives them back when it ends.

python -m maxtext_pp_ext.compiled.measured.devices RESULT.json
"""

from __future__ import annotations

import collections
import json
import pathlib
import sys
from typing import Any

from maxtext_pp_ext.compiled import child, limits


def of_machine(machine: child.Machine, bounds: limits.Limits) -> dict[str, Any]:
  """Asks for JAX's default devices.

  Returns:
    Their `platform`, number by kind (`kinds`), `count`, number of `processes` that they belong to, and the version of
    their `runtime`; or `failure`.
  """
  return child.run(__name__, [], bounds=bounds, devices=machine)


def main(argv: list[str]) -> None:
  """The process that asks."""
  import jax

  devices = jax.devices()
  found = {
      "platform": devices[0].platform,
      "kinds": collections.Counter(device.device_kind for device in devices),
      "count": len(devices),
      "processes": jax.process_count(),
      "runtime": devices[0].client.platform_version,
  }
  pathlib.Path(argv[0]).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
  main(sys.argv[1:])

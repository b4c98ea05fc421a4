# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""What `maxtext-pp plan` estimates for each file in examples/.

  python -m benchmarks.examples

It compiles nothing, and writes examples/README.md. The devices are those of the file's own `maxtext-pp check` line.
"""

from __future__ import annotations

import pathlib
import re
from typing import Any

from benchmarks import tables
from maxtext_pp_ext import units
from maxtext_pp_ext.plan import chips

FOLDER = pathlib.Path(__file__).resolve().parents[1] / "examples"
_INTRODUCTION = """# Examples

`python -m benchmarks.examples` wrote this list. Each file is a config of MaxText, and begins with the commands that use
it. Those called laptop train on 8 virtual CPU devices; the others are for TPUs, which `maxtext-pp check` and `compare` do
not need. Memory, bytes sent and seconds are estimates of `maxtext-pp check` and `plan` for one device and step, not
measurements ([docs/choosing.md](../docs/choosing.md) says how far they are off).
"""
_HEADER = ("file", "what it is", "devices", "memory", "sent", "step s")


def topology(file: pathlib.Path) -> list[str]:
  """The keys that choose the devices in a file's own `maxtext-pp check` line; [] for files that have none."""
  found = re.search(r"maxtext-pp check \S+ (.*)", file.read_text(encoding="utf-8"))
  return found[1].split() if found else []


def row(file: pathlib.Path) -> tuple[str, ...]:
  """The file's line of the table."""
  from maxtext_pp_ext.config import derived
  from maxtext_pp_ext.host.models import abstract_model, run_config
  from maxtext_pp_ext.plan import of_run

  devices: dict[str, Any] = {} if topology(file) else {"internal_compile": True, "internal_compile_num_devices": 8}
  config = run_config.read_without_run([str(file), *topology(file)], **devices)
  impl, chip = derived.pipeline_impl(config), chips.of_topology(config.compile_topology or "")
  explained = abstract_model.explained(config)
  # All examples run an implementation that has formulas.
  costs, estimate = of_run.of_run(config, impl, run_config.schedule_of(config), *explained, chip)  # type: ignore[misc]
  title = file.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ").removesuffix(".")
  return (
      f"[{file.name}]({file.name})",
      title,
      str(config.num_target_devices),
      units.bytes_text(costs.peak),
      units.bytes_text(costs.sent),
      f"{estimate.seconds:.3g}" if estimate else tables.MISSING,
  )


def report() -> str:
  rows = [row(file) for file in sorted(FOLDER.glob("*.yml"))]
  return f"{_INTRODUCTION}\n{tables.markdown(_HEADER, rows)}\n"


def main() -> None:
  import maxtext_pp_ext

  maxtext_pp_ext.install()
  text = report()
  (FOLDER / "README.md").write_text(text, encoding="utf-8")
  print(text)


if __name__ == "__main__":
  main()

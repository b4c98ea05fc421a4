# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Environments with other versions than those of .venv."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

NAMES = ("oldest", "newest")
PACKAGES = ("maxtext", "jax", "jaxlib", "libtpu", "flax", "optax", "orbax-checkpoint", "numpy")


def build(root: pathlib.Path, name: str) -> pathlib.Path:
  """Returns the interpreter of an environment, which is made if it is missing or older than what it is made from."""
  folder, constraints = root / f".venv-{name}", root / ".ci" / f"constraints-{name}.txt"
  installed = folder / "installed"
  made_from = (
      root / "setup.cfg",
      constraints,
      root / ".ci" / "environment",
      root / "maxtext_pp_ext" / "host" / "build.py",
  )
  if not installed.exists() or any(file.stat().st_mtime > installed.stat().st_mtime for file in made_from):
    command = [
        root / ".ci" / "environment",
        sys.executable,
        folder.name,
        constraints.relative_to(root),
        ".[cpu,tools,test]",
    ]
    subprocess.run(command, cwd=root, check=True)
  return folder / "bin" / "python"


def versions(python: pathlib.Path) -> dict[str, str]:
  """Returns the versions of Python and of the packages that matter in an environment."""
  code = (
      "import importlib.metadata as m, json, platform; "
      f"print(json.dumps({{'Python': platform.python_version()}} | {{name: m.version(name) for name in {PACKAGES!r}}}))"
  )
  return json.loads(subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout)

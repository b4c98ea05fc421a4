# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Every code block of docs/sharding.md runs, and prints what is shown below it."""

import os
import pathlib
import re
import subprocess
import sys

GUIDE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "sharding.md"
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)
END = "--- end of block ---"


def test_the_guide_prints_what_it_says_and_calls_nothing_deprecated(tmp_path):
  blocks = BLOCK.findall(GUIDE.read_text())
  assert len(blocks) == GUIDE.read_text().count("```python") >= 10
  program = "".join(f"{code}\nprint({END!r})\n" for code, _ in blocks)
  # As MaxText is not there, nothing of it can be needed; a deprecated call from the guide itself is an error.
  program = f"import sys\nsys.modules['maxtext'] = None\n{program}"
  (tmp_path / "guide.py").write_text(program)
  command = [sys.executable, "-W", "error::DeprecationWarning:__main__", "guide.py"]
  environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(GUIDE.parents[1])}
  environment["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
  done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False)
  assert done.returncode == 0, done.stderr[-4000:]
  printed = done.stdout.split(f"{END}\n")
  assert printed.pop() == ""
  for (code, expected), found in zip(blocks, printed, strict=True):
    assert found == expected, code

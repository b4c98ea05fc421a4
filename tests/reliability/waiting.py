# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""A process that reports, then waits: `python -m tests.reliability.waiting [child | fail | HOW-beside PROCESS FAILING]`.

With `child` it starts another process that waits. With `fail` it exits with code 3 and skips the shutdown of
`jax.distributed`, which would wait for others. With `fail-beside`, PROCESS its own number of two, it does that if it is
the one that is FAILING, once the other one hangs, deaf to all but SIGKILL; with `exit-beside` it calls `sys.exit`.
"""

import os
import pathlib
import signal
import subprocess
import sys
import time

import psutil

WAIT_S = 600  # longer than any test waits


def wait_until(condition):
  deadline = time.monotonic() + WAIT_S
  while not condition():
    if time.monotonic() > deadline:
      raise TimeoutError
    time.sleep(0.02)


def number_in(file):
  """The number in a file; None before it has been written."""
  return int(file.read_text(encoding="utf-8") or 0) if file.exists() else None


def fail_beside(end, process, failing):
  own, other = (pathlib.Path(f"{i}.pid").absolute() for i in (process, 1 - process))
  own.write_text(str(os.getpid()), encoding="utf-8")
  wait_until(lambda: number_in(other))  # then it has joined, and nothing waits for the coordinator
  if process != failing:
    os.kill(os.getpid(), signal.SIGSTOP)
  wait_until(lambda: psutil.Process(number_in(other)).status() == psutil.STATUS_STOPPED)
  end(3)


arguments = sys.argv[1:]
if arguments == ["child"]:
  subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({WAIT_S})"])
elif arguments == ["fail"]:
  os._exit(3)
elif arguments:
  fail_beside({"fail-beside": os._exit, "exit-beside": sys.exit}[arguments[0]], *map(int, arguments[1:]))
print("waiting", flush=True)
time.sleep(WAIT_S)

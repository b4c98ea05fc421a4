# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Stands between a process and a command that it runs: `python -I -S guardian.py LIFELINE COMMAND …`.

LIFELINE is the descriptor of a pipe that nobody writes into. When its other end is closed, by the parent or by the
kernel because the parent has ended in whatever way, also by SIGKILL, all that descends from here is killed. SIGTERM
is passed on to the command alone. What a command that ends leaves running is killed, and then this process ends as the
command did: with its exit code, or by its signal.

Why a process: Linux can send a signal to a child when its parent ends (PR_SET_PDEATHSIG), but not to what the child has
started, and does it already when the *thread* that started the child ends. And the child itself cannot watch a pipe
while it is stopped, or compiles and holds the interpreter's lock.

Standard library only, and nothing of this package, since it starts with every command: less than 0.1 s.
"""

import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import sys
import threading
from typing import NoReturn

# Of linux/prctl.h.
_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36
_NO_COMMAND = 127  # as a shell has it


def main() -> NoReturn:
  lifeline, command = int(sys.argv[1]), sys.argv[2:]
  asked: list[int] = []
  signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))  # until there is a command
  _prctl(_SET_CHILD_SUBREAPER, 1)  # what loses its parent becomes ours, also if it has left group and session
  try:
    # Should this process be killed, the command is, too. Functions before exec are safe here, where there are no threads.
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        process_group=0,
        preexec_fn=lambda: _prctl(_SET_PDEATHSIG, signal.SIGKILL),  # noqa: PLW1509
    )
  except OSError as error:
    print(f"{command[0]}: {error.strerror}", file=sys.stderr, flush=True)
    os._exit(_NO_COMMAND)
  signal.signal(signal.SIGTERM, lambda number, _: _send(process.pid, number))
  for number in asked:
    _send(process.pid, number)
  threading.Thread(target=_watch, args=(lifeline, process.pid), daemon=True).start()
  # All that end are waited for, not the command alone: orphans are this process's as well.
  while (ended := os.waitpid(-1, 0))[0] != process.pid:
    pass
  with contextlib.suppress(ChildProcessError):
    while True:
      _kill_children(process.pid)
      os.waitpid(-1, 0)  # those of one that has ended are ours next
  _end_like(ended[1])


def _watch(lifeline: int, command: int) -> None:
  while os.read(lifeline, 1):
    pass
  _kill_children(command)


def _kill_children(command: int) -> None:
  """Kills all processes whose parent this one is; where /proc does not tell, the command's group."""
  if not os.path.exists("/proc/self/stat"):
    with contextlib.suppress(ProcessLookupError, PermissionError):
      os.killpg(command, signal.SIGKILL)
  for name in filter(str.isdecimal, os.listdir("/proc") if os.path.isdir("/proc") else ()):
    # One that has ended meanwhile has no file any more.
    with contextlib.suppress(OSError), open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as stat:
      if int(stat.read().rpartition(")")[2].split()[1]) == os.getpid():
        _send(int(name), signal.SIGKILL)


def _send(pid: int, number: int) -> None:
  with contextlib.suppress(ProcessLookupError):
    os.kill(pid, number)


def _prctl(option: int, value: int) -> None:
  if sys.platform == "linux":
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _end_like(status: int) -> NoReturn:
  if os.WIFSIGNALED(status):
    number = os.WTERMSIG(status)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the command's own is enough
    if number != signal.SIGKILL:
      signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
  os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


if __name__ == "__main__":
  main()

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Stands between a process and a command that it runs: `python -I -S guardian.py LIFELINE COMMAND …`.

LIFELINE is the descriptor of a pipe into which nobody writes. Its other end closes when the parent closes it or ends in
any way, even by SIGKILL; then the guardian kills all its descendants. It passes SIGTERM on to the command alone. When the
command ends, the guardian kills what the command left running, and then ends as the command did: with its exit code, or
by its signal.

Why a separate process? Linux can signal a child when its parent ends (PR_SET_PDEATHSIG), but not the child's own
children, and it does so already when the *thread* that started the child ends. The child itself cannot watch a pipe while
it is stopped, or while it compiles and holds the interpreter's lock.

Uses the standard library only, and nothing of this package, since it starts with every command: in less than 0.1 s.
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

# From linux/prctl.h.
_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36
_NO_COMMAND = 127  # as in a shell


def main() -> NoReturn:
  lifeline, command = int(sys.argv[1]), sys.argv[2:]
  asked: list[int] = []
  signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))  # until there is a command
  _prctl(_SET_CHILD_SUBREAPER, 1)  # orphans become our children, even if they left group and session
  try:
    # If this process is killed, so is the command. A function before exec is safe here, since there are no threads.
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
  # Waits for all children, not the command alone: orphans are children of this process, too.
  while (ended := os.waitpid(-1, 0))[0] != process.pid:
    pass
  with contextlib.suppress(ChildProcessError):
    while True:
      _kill_children(process.pid)
      os.waitpid(-1, 0)  # the children of an ended process are ours next
  _end_like(ended[1])


def _watch(lifeline: int, command: int) -> None:
  while os.read(lifeline, 1):
    pass
  _kill_children(command)


def _kill_children(command: int) -> None:
  """Kills all children of this process; without /proc, the command's process group."""
  if not os.path.exists("/proc/self/stat"):
    with contextlib.suppress(ProcessLookupError, PermissionError):
      os.killpg(command, signal.SIGKILL)
  for name in filter(str.isdecimal, os.listdir("/proc") if os.path.isdir("/proc") else ()):
    # A process that has ended meanwhile has no file.
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

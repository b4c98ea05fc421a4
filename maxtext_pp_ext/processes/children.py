# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Starts commands in processes that end with the process that started them, together with all their descendants."""

from collections.abc import Sequence
import contextlib
import os
import pathlib
import subprocess
import sys
from typing import Any

# Seconds after SIGTERM in which a command can end its own children and remove its temporary folders.
GRACE_S = 5.0
# Seconds. Killed processes end at once, unless the kernel waits for a device.
_KILLED_S = 10.0
# Options of a command whose output, errors included, is read line by line.
LINES: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
_GUARDIAN = pathlib.Path(__file__).resolve().with_name("guardian.py")


class Child(subprocess.Popen):
  """`subprocess.Popen` of a command that has no input, a session of its own, and a `guardian`.

  No descendant of the command outlives the command, this object, or this process, however those end. `pid` is that of the
  guardian, which passes SIGTERM on and ends as the command does. As a context manager, it waits for the command at its
  end, or ends the command if an exception leaves the context. Any thread may use it.

  Except on Linux, processes that leave the command's process group are not noticed.
  """

  def __init__(self, command: Sequence[str], **options: Any):
    """Starts a program with arguments; `options` are those of `subprocess.Popen`, such as `env`, `cwd`, `stdout`."""
    # A file, so it is closed, and the command ended, when this object is dropped. No other process inherits it.
    lifeline, write = os.pipe()
    self._lifeline = open(write, "wb", buffering=0)  # pylint: disable=consider-using-with
    try:
      super().__init__(
          [sys.executable, "-I", "-S", str(_GUARDIAN), str(lifeline), *command],
          stdin=subprocess.DEVNULL,
          pass_fds=(lifeline,),
          start_new_session=True,
          **options,
      )
    except BaseException:
      self._lifeline.close()
      raise
    finally:
      os.close(lifeline)

  def __exit__(self, kind, error, traceback) -> None:
    try:
      if kind is None:
        self.wait()
    finally:
      if self.poll() is None:
        self.end()
      super().__exit__(kind, error, traceback)
      self._lifeline.close()

  def __del__(self, *args: Any, **options: Any) -> None:
    if hasattr(self, "_lifeline"):
      self._lifeline.close()
    super().__del__(*args, **options)  # this keeps a process that still runs, to wait for it later

  def end(self, grace_s: float = GRACE_S) -> None:
    """Ends the command by SIGTERM, and by `cut` if it still runs after `grace_s` seconds."""
    with contextlib.suppress(subprocess.TimeoutExpired):
      self.terminate()
      self.wait(grace_s)
    self.cut()

  def kill(self) -> None:
    """Lets the guardian kill the command and all its descendants."""
    self._lifeline.close()

  def cut(self) -> None:
    """Kills the command and all its descendants, and waits until they are gone."""
    self.kill()
    try:
      self.wait(_KILLED_S)
    except subprocess.TimeoutExpired:
      super().kill()  # kills the guardian, and the command with it
      self.wait()

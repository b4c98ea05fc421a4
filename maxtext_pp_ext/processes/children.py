# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Commands in processes that end with the one that started them, and so does all that they start."""

from __future__ import annotations

from collections.abc import Sequence
import contextlib
import os
import pathlib
import subprocess
import sys
from typing import Any

# After SIGTERM, in which a command can end what it has itself started and remove its temporary folders.
GRACE_S = 5.0
# Killed processes are gone at once, unless the kernel waits for a device.
_KILLED_S = 10.0
_GUARDIAN = pathlib.Path(__file__).resolve().with_name("guardian.py")


class Child(subprocess.Popen):
  """`subprocess.Popen` of a command that has no input, a session of its own, and a `guardian`.

  None of the processes that descend from it outlives it, this object, or this process, whatever ends them. In the place
  of its process identifier it has the guardian's, which passes SIGTERM on and ends as the command does. As a context, it
  has ended at its end: it is waited for, or if an exception leaves the context, ended. Can be used in any thread.

  Where there is no Linux, what has left the command's process group is not noticed.
  """

  def __init__(self, command: Sequence[str], **options: Any):
    """Starts it.

    Args:
      command: program and arguments.
      **options: of `subprocess.Popen`, such as `env`, `cwd`, `stdout`.
    """
    # A file, so that whatever drops this object closes it, and so ends the command. No other process inherits it.
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
    super().__del__(*args, **options)  # which keeps what still runs, so as to wait for it at some time

  def end(self, grace_s: float = GRACE_S) -> None:
    """Ends it by SIGTERM, and if it still runs after so many seconds, by `cut`."""
    with contextlib.suppress(subprocess.TimeoutExpired):
      self.terminate()
      self.wait(grace_s)
    self.cut()

  def kill(self) -> None:
    """Has it killed, and all that descends from it."""
    self._lifeline.close()

  def cut(self) -> None:
    """Kills it and all that descends from it, and waits until they are gone."""
    self.kill()
    try:
      self.wait(_KILLED_S)
    except subprocess.TimeoutExpired:
      super().kill()  # the guardian itself, with which the command goes
      self.wait()

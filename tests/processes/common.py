# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Commands started as a person starts them, each in its own folder, and the files that they leave there."""

import os
import pathlib
import signal
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
LONG_S = 600  # longer than any test waits
# Whatever pytest was started by: a shell has what it runs in the background ignore SIGINT, nohup has it ignore SIGHUP.
_DEFAULT = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGTERM, signal.SIG_DFL)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
"""
# What starts one process in a session of its own and one that ignores SIGTERM, says when both are there, and sleeps.
SLEEP = f"import time; time.sleep({LONG_S})"
DEAF = "import pathlib, signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); pathlib.Path('deaf').touch(); "
PARENT = f"""
import pathlib, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", {SLEEP!r}], start_new_session=True)
subprocess.Popen([sys.executable, "-c", {DEAF + SLEEP!r}])
while not pathlib.Path("deaf").exists():
  time.sleep(0.02)
pathlib.Path("ready").touch()
time.sleep({LONG_S})
"""


def running_in(folder):
  """The commands of the processes that work in this folder, by process id."""
  found = {}
  for process in pathlib.Path("/proc").iterdir():
    try:
      if process.name.isdecimal() and pathlib.Path(os.readlink(process / "cwd")) == folder.resolve():
        found[int(process.name)] = (process / "cmdline").read_text(encoding="utf-8", errors="replace").split("\0")
    except OSError:
      pass  # it has ended, or is not ours
  return found


def until(condition, what):
  """Waits until a condition is true. The time limit is long enough for anything that happens at all."""
  deadline = time.monotonic() + 240
  while not condition():
    assert time.monotonic() < deadline, what
    time.sleep(0.05)


class Command:
  """A program that runs in a folder, with temporary folders in its `temporary`; as a context, it is killed on exit."""

  def __init__(self, folder, program, *arguments):
    self.folder, self.temporary = folder, folder / "temporary"
    self.temporary.mkdir()
    with open(folder / "said", "wb") as said:
      self.process = subprocess.Popen(
          [sys.executable, "-c", _DEFAULT + program, *arguments],
          cwd=folder,
          env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(self.temporary), "MAXTEXT_PP_EXT": "off"},
          stdin=subprocess.DEVNULL,
          stdout=said,
          stderr=said,
          start_new_session=True,  # so that a signal to it goes to no one else
      )

  def __enter__(self):
    return self

  def __exit__(self, *_):
    self.process.kill()
    self.process.wait()
    for pid in running_in(self.folder):
      os.kill(pid, signal.SIGKILL)

  @property
  def said(self):
    return (self.folder / "said").read_text(encoding="utf-8")

  def running(self):
    return list(running_in(self.folder).values())

  def left(self):
    """The content of the folder of temporary files."""
    return list(self.temporary.iterdir())

  def wait_for(self, what):
    """Waits until the command, or one of its children, has written a file of this name into the folder."""
    until(lambda: (self.folder / what).exists() or self.process.poll() is not None, f"no {what}: {self.said}")
    assert (self.folder / what).exists(), self.said

  def code_after(self, number):
    """The exit code after this signal, which goes to the command only."""
    self.process.send_signal(number)
    until(lambda: self.process.poll() is not None, f"it still runs: {self.running()}, {self.said}")
    return self.process.returncode

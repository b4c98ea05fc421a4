# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""What commands print: results on stdout, all else on stderr."""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import json
import os
import sys
import tempfile
import threading
import time
from typing import Any, TextIO

from maxtext_pp_ext.cli.errors import CommandError, REFUSALS
from maxtext_pp_ext.errors import SetupError

# Seconds. What takes longer shows how far it is.
PATIENCE = 2.0
# Between two lines where there is no terminal; between two looks at what is shown on one.
_BETWEEN_LINES, _BETWEEN_LOOKS = 30.0, 0.25


def print_json(result: Any) -> None:
  """Prints a result for programs."""
  print(json.dumps(result, indent=2))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
  """Keeps what libraries print, and what they log, from the terminal.

  MaxText and what it imports have much to say on both streams. It is shown if what they do fails unexpectedly.
  """
  sys.stdout.flush()
  sys.stderr.flush()
  with tempfile.TemporaryFile() as said:
    saved = [os.dup(fd) for fd in (1, 2)]
    # A caller may have put streams without a descriptor in the place of the process's own. This one is never closed: a
    # handler of logging that is made meanwhile keeps it, and writes later where stderr is then.
    stream = open(2, "w", encoding="utf-8", buffering=1, closefd=False)  # pylint: disable=consider-using-with
    failed = True
    try:
      for fd in (1, 2):
        os.dup2(said.fileno(), fd)
      try:
        with contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
          yield
        failed = False
      except (*REFUSALS, CommandError, SetupError, KeyboardInterrupt):
        failed = False  # has a message of its own
        raise
    finally:
      for each in (stream, sys.stdout, sys.stderr):
        each.flush()
      for fd, old in zip((1, 2), saved, strict=True):
        os.dup2(old, fd)
        os.close(old)
      if failed:
        said.seek(0)
        sys.stderr.write(said.read().decode(errors="replace"))


class Progress:
  """What is under way, since when, and how far it is.

  Attributes:
    text: what it is.
    detail: said after the seconds.
    done, total: how much of how much; total 0 if there is no telling.
  """

  def __init__(self, text: str):
    self.text = text
    self.detail = ""
    self.done = self.total = 0
    self._started = time.monotonic()

  def say(self, detail: str) -> None:
    self.detail = detail

  def at(self, done: int, total: int) -> None:
    self.done, self.total = done, total

  def __str__(self) -> str:
    share = f"{100 * self.done // self.total} %" if self.total else ""
    seconds = f"{time.monotonic() - self._started:.0f} s"
    return f"{self.text}: {', '.join(filter(None, (share, seconds, self.detail)))}"


@contextlib.contextmanager
def progress(text: str) -> Iterator[Progress]:
  """Shows on stderr what is under way, if it takes long; yields what can be told how far it is.

  On a terminal that has rich there is a bar, elsewhere a line now and then.
  """
  shown, ended = Progress(text), threading.Event()
  with _stderr() as stream:
    # A thread, as libraries do not call back; rich is imported here, since an import at a time is safest.
    rich = _rich() if stream.isatty() else None
    show = (lambda: _bar(shown, ended, stream, *rich)) if rich else (lambda: _lines(shown, ended, stream))
    thread = threading.Thread(target=lambda: ended.wait(PATIENCE) or show(), daemon=True)
    thread.start()
    try:
      yield shown
    finally:
      ended.set()
      thread.join()


@contextlib.contextmanager
def _stderr() -> Iterator[TextIO]:
  """stderr as it is now, also while `quiet` keeps what libraries print from it."""
  try:
    descriptor = os.dup(sys.stderr.fileno())
  except (OSError, ValueError):  # a stream in its place that has no descriptor
    yield sys.stderr
  else:
    with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
      yield stream


def _lines(shown: Progress, ended: threading.Event, stream: TextIO) -> None:
  while True:
    print(shown, file=stream, flush=True)
    if ended.wait(_BETWEEN_LINES):
      return


def _bar(shown: Progress, ended: threading.Event, stream: TextIO, console: Any, bars: Any) -> None:
  columns = (bars.TextColumn("{task.description}", markup=False), bars.BarColumn())
  screen = console.Console(file=stream, force_terminal=True)
  # Another thread may have redirected the process's streams: they are left alone.
  with bars.Progress(*columns, console=screen, transient=True, redirect_stdout=False, redirect_stderr=False) as bar:
    task = bar.add_task(str(shown), total=None)
    while not ended.wait(_BETWEEN_LOOKS):
      bar.update(task, description=str(shown), completed=shown.done, total=shown.total or None)


def _rich():
  try:
    from rich import console  # pylint: disable=import-outside-toplevel
    from rich import progress as bars
  except ImportError:
    return None
  return console, bars

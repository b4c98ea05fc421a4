# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Output of commands: results on stdout, everything else on stderr."""

from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import json
import os
import sys
import tempfile
import threading
import time
from typing import Any, TextIO

from maxtext_pp_ext.cli.errors import CommandError, REFUSALS, refusing
from maxtext_pp_ext.errors import SetupError

# Seconds. Work that takes longer shows its progress.
PATIENCE = 2.0
# Seconds between two lines without a terminal; between two updates of a bar on one.
_BETWEEN_LINES, _BETWEEN_LOOKS = 30.0, 0.25


def json_text(result: Any) -> str:
  return json.dumps(result, indent=2)


def print_result(result: Any, as_json: bool, show: Callable[[Any], None]) -> None:
  """Prints a result as JSON, for programs, or lets `show` print it for people."""
  if as_json:
    print(json_text(result))
  else:
    show(result)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
  """Keeps output and logs of libraries from the terminal.

  MaxText and its imports print much on both streams. Their output is shown if they fail unexpectedly.
  """
  sys.stdout.flush()
  sys.stderr.flush()
  with tempfile.TemporaryFile() as said:
    saved = [os.dup(fd) for fd in (1, 2)]
    # A caller may have replaced the process's streams by ones without a descriptor. This one is never closed: a logging
    # handler made meanwhile keeps it, and later writes to what stderr is then.
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


@dataclasses.dataclass
class Progress:
  """The state of some work, which may change at any time."""

  text: str  # what it is
  detail: str = ""  # shown after the seconds
  done: int = 0  # how much of the total is done
  total: int = 0  # 0 if it is not known
  started: float = dataclasses.field(default_factory=lambda: time.monotonic())  # pylint: disable=unnecessary-lambda

  def __str__(self) -> str:
    share = f"{100 * self.done // self.total} %" if self.total else ""
    seconds = f"{time.monotonic() - self.started:.0f} s"
    return f"{self.text}: {', '.join(filter(None, (share, seconds, self.detail)))}"


@contextlib.contextmanager
def progress(text: str) -> Iterator[Progress]:
  """Shows work on stderr if it takes long; yields the `Progress` that takes updates.

  On a terminal with rich it shows a bar, elsewhere a line now and then.
  """
  shown, ended = Progress(text), threading.Event()
  with _stderr() as stream:
    # rich is imported here and not in the thread, since one import at a time is safest.
    rich = _rich() if stream.isatty() else None
    # A thread, as libraries do not call back.
    thread = threading.Thread(target=_show, args=(shown, ended, stream, rich), daemon=True)
    thread.start()
    try:
      yield shown
    finally:
      ended.set()
      thread.join()


@contextlib.contextmanager
def working(text: str) -> Iterator[Progress]:
  """Shows work as `progress` does, keeps libraries `quiet`, and turns errors about a user's input into CommandError."""
  with refusing(), progress(text) as shown, quiet():
    yield shown


@contextlib.contextmanager
def _stderr() -> Iterator[TextIO]:
  """Yields the present stderr, also while `quiet` redirects the output of libraries."""
  try:
    descriptor = os.dup(sys.stderr.fileno())
  except (OSError, ValueError):  # a stream in its place that has no descriptor
    yield sys.stderr
  else:
    with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
      yield stream


def _show(shown: Progress, ended: threading.Event, stream: TextIO, rich: tuple[Any, Any] | None) -> None:
  if ended.wait(PATIENCE):
    return
  if rich is None:
    print(shown, file=stream, flush=True)
    while not ended.wait(_BETWEEN_LINES):
      print(shown, file=stream, flush=True)
    return
  console, bars = rich
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

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""What commands print: results on stdout, all else on stderr."""

from __future__ import annotations

from collections.abc import Callable, Iterator
import contextlib
import json
import os
import sys
import tempfile
import time
from typing import Any

# What takes longer than this shows how far it is.
PATIENCE = 2.0


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
    failed = True
    try:
      for fd in (1, 2):
        os.dup2(said.fileno(), fd)
      try:
        # A caller may have put streams without a descriptor in the place of the process's own.
        with os.fdopen(os.dup(said.fileno()), "w", encoding="utf-8") as stream:
          with contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
            yield
        failed = False
      except (ValueError, NotImplementedError, OSError, KeyboardInterrupt):
        failed = False  # has a message of its own
        raise
    finally:
      sys.stdout.flush()
      sys.stderr.flush()
      for fd, old in zip((1, 2), saved, strict=True):
        os.dup2(old, fd)
        os.close(old)
      if failed:
        said.seek(0)
        sys.stderr.write(said.read().decode(errors="replace"))


@contextlib.contextmanager
def progress(text: str) -> Iterator[Callable[[int, int], None]]:
  """Yields a function to be called with how much of how much is done; it shows that on stderr, if it takes long.

  On a terminal that has rich there is a bar, elsewhere a line now and then.
  """
  started = last = time.monotonic()
  bar = task = None

  def show(done: int, total: int) -> None:
    nonlocal bar, task, last
    now = time.monotonic()
    if bar is not None:
      bar.update(task, completed=done, total=total)
    elif now - started >= PATIENCE and sys.stderr.isatty() and (rich := _rich()):
      console, bars = rich
      bar = bars.Progress(console=console.Console(stderr=True), transient=True)
      bar.start()
      task = bar.add_task(text, completed=done, total=total)
    elif now - last >= (PATIENCE if last == started else 10.0):
      last = now
      print(f"{text}: {100 * done // max(total, 1)} %", file=sys.stderr, flush=True)

  try:
    yield show
  finally:
    if bar is not None:
      bar.stop()


@contextlib.contextmanager
def waiting(text: str) -> Iterator[None]:
  """Says on stderr what is being waited for, where there is no telling how long it takes."""
  rich = _rich() if sys.stderr.isatty() else None
  if rich is None:
    print(f"{text} …", file=sys.stderr, flush=True)
    yield
  else:
    console, _ = rich
    # Of its own descriptor: what libraries print meanwhile is kept from stderr.
    with os.fdopen(os.dup(2), "w", encoding="utf-8") as terminal:
      with console.Console(file=terminal, force_terminal=True).status(text):
        yield


def _rich():
  try:
    from rich import console, progress as bars  # pylint: disable=import-outside-toplevel
  except ImportError:
    return None
  return console, bars


def bytes_text(count: float) -> str:
  """A number of bytes for people."""
  for unit in ("B", "kB", "MB", "GB"):
    if count < 1000:
      return f"{count:.3g} {unit}"
    count /= 1000
  return f"{count:.3g} TB"

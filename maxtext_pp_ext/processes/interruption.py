# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Turns signals that end a command into an exception, so the command ends its children and removes its temporary folders.

For programs: only their outermost function knows that nothing else in the process objects. Library functions leave
signals alone. If a signal ends the process at once, its children end with it (see `guardian`).
"""

from collections.abc import Callable, Iterator
import contextlib
import functools
import os
import signal
import sys
import tempfile
import threading
from typing import Any
import weakref

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Seconds after which a signal that could not raise is sent again, until its handler is called.
_AGAIN_S = 0.05
_DEFAULTS = (signal.SIG_DFL, signal.default_int_handler)


class Interrupted(KeyboardInterrupt):
  """A signal that ends the command arrived; `number` is its number."""

  def __init__(self, number: int):
    super().__init__(f"interrupted by {signal.Signals(number).name}")
    self.number = number


class _Again(threading.Timer):
  """Calls its function again and again, until it is cancelled.

  Once is too few: Python handles a signal that comes just before a system call when that call ends, which may be never.
  """

  def run(self) -> None:
    while not self.finished.wait(self.interval):
      self.function(*self.args, **self.kwargs)


class _Handler:
  """Raises in the main thread, which is where Python handles signals."""

  def __init__(self):
    # A closing terminal sends several signals. While the exception of the first one propagates, others must not disturb
    # the cleanup. If something swallows that exception, it is gone, and the next signal raises again.
    self._on_its_way: Callable[[], Interrupted | None] = lambda: None
    self._holding = False
    self._held: list[int] = []
    self._again: _Again | None = None

  def __call__(self, number: int, _: object = None) -> None:
    self._cancel()
    if self._holding:
      self._held.append(number)
    elif self._on_its_way() is None:
      raise self._new(number)

  def _new(self, number: int) -> Interrupted:
    # Not in `__call__`: its variables and the exception would keep each other alive.
    error = Interrupted(number)
    self._on_its_way = weakref.ref(error)
    return error

  def arrived(self) -> None:
    """Notes that no exception is on its way any more, even if something keeps it alive."""
    self._on_its_way = lambda: None
    self._cancel()

  def _cancel(self) -> None:
    if self._again is not None:
      self._again.cancel()

  def unraisable(self, before: Callable[[Any], object], found: Any) -> None:
    """For `sys.unraisablehook`: sends a signal again if it raised where no exception can leave, such as in finalizers.

    JAX has Python call it after each garbage collection, so a signal that comes during one is raised just there.
    """
    if not isinstance(found.exc_value, Interrupted):
      before(found)
      return
    self.arrived()
    self._again = _Again(_AGAIN_S, os.kill, (os.getpid(), found.exc_value.number))
    self._again.daemon = True
    self._again.start()

  @contextlib.contextmanager
  def hold(self) -> Iterator[None]:
    """Delays signals: the first one that arrives meanwhile is handled at the end."""
    if self._holding or threading.current_thread() is not threading.main_thread():
      yield
      return
    self._holding = True
    try:
      yield
    finally:
      self._holding = False
      held, self._held = self._held, []
      if held:
        self(held[0])


_handler = _Handler()


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
  """Makes SIGINT, SIGTERM and SIGHUP raise `Interrupted` within the context.

  Exceptions: signals that are ignored (nohup ignores SIGHUP; a shell ignores SIGINT for background commands), and signals
  that other code handles. Nothing changes in other threads than the main one, which cannot handle signals.
  """
  if threading.current_thread() is not threading.main_thread():
    yield
    return
  before, hook = {}, sys.unraisablehook
  sys.unraisablehook = functools.partial(_handler.unraisable, hook)
  try:
    for number in SIGNALS:
      if signal.getsignal(number) in _DEFAULTS:
        before[number] = signal.signal(number, _handler)
    yield
  finally:
    if before:
      _handler.arrived()
    for number, old in before.items():
      signal.signal(number, old)
    sys.unraisablehook = hook


@contextlib.contextmanager
def temporary_folder(prefix: str | None = None) -> Iterator[str]:
  """Yields a `tempfile.TemporaryDirectory`; signals that `interruptible` handles leave no half of it."""
  folder = None
  try:
    with _handler.hold():
      folder = tempfile.TemporaryDirectory(prefix=prefix)  # pylint: disable=consider-using-with
    yield folder.name
  finally:
    with _handler.hold():
      if folder is not None:
        folder.cleanup()


def run(main: Callable[[], int | None], name: str) -> int:
  """Runs a program's outermost function, which signals may interrupt; returns the exit code.

  After a signal that is 128 plus its number, as in a shell: 129 for SIGHUP, 130 for SIGINT, 143 for SIGTERM.
  """
  try:
    with interruptible():
      return main() or 0
  except KeyboardInterrupt as error:
    print(f"{name}: {str(error) or 'interrupted'}", file=sys.stderr)
    return 128 + getattr(error, "number", signal.SIGINT)

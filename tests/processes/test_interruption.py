# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""When a signal becomes an exception, and when not."""

import gc
import os
import pathlib
import signal
import sys
import threading
import time

import pytest

from maxtext_pp_ext.processes import interruption
from tests.processes import common


@pytest.fixture(autouse=True)
def defaults():
  """Sets the dispositions of signals with which a program starts, and restores the previous ones."""
  before = {number: signal.getsignal(number) for number in interruption.SIGNALS}
  signal.signal(signal.SIGINT, signal.default_int_handler)
  signal.signal(signal.SIGTERM, signal.SIG_DFL)
  signal.signal(signal.SIGHUP, signal.SIG_DFL)
  yield
  for number, old in before.items():
    signal.signal(number, old)


def dispositions():
  return [signal.getsignal(number) for number in interruption.SIGNALS]


def interrupted_by(number):
  signal.raise_signal(number)
  raise AssertionError("nothing was raised")


@pytest.mark.parametrize("number, code", [(signal.SIGHUP, 129), (signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_exit_code_is_128_and_the_signal_and_dispositions_are_put_back(capsys, number, code):
  before = dispositions()
  assert interruption.run(lambda: interrupted_by(number), "program") == code
  assert capsys.readouterr().err == f"program: interrupted by {number.name}\n"
  assert dispositions() == before


@pytest.mark.parametrize("returned, code", [(None, 0), (0, 0), (1, 1)])
def test_without_a_signal_the_exit_code_is_what_the_program_returns(returned, code):
  before = dispositions()
  assert interruption.run(lambda: returned, "program") == code
  assert dispositions() == before


def test_ignored_signals_stay_ignored_and_other_handlers_stay():
  came = []
  signal.signal(signal.SIGHUP, signal.SIG_IGN)
  signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
  with interruption.interruptible():
    signal.raise_signal(signal.SIGHUP)
    signal.raise_signal(signal.SIGTERM)
  assert came == [signal.SIGTERM]


def test_in_another_thread_nothing_is_installed():
  before, seen = dispositions(), []

  def thread():
    with interruption.interruptible(), interruption.temporary_folder() as folder:
      seen.append((dispositions(), pathlib.Path(folder).is_dir()))

  started = threading.Thread(target=thread)
  started.start()
  started.join()
  assert seen == [(before, True)]


def test_a_signal_that_comes_while_one_is_on_its_way_raises_nothing():
  with pytest.raises(interruption.Interrupted, match="SIGTERM") as raised, interruption.interruptible():
    try:
      signal.raise_signal(signal.SIGTERM)
    finally:
      for number in interruption.SIGNALS:
        signal.raise_signal(number)
  assert raised.value.__context__ is None


def test_the_signal_after_a_swallowed_one_raises():
  with pytest.raises(interruption.Interrupted, match="SIGHUP"), interruption.interruptible():
    try:
      signal.raise_signal(signal.SIGTERM)
    except BaseException:  # pylint: disable=broad-exception-caught
      pass
    signal.raise_signal(signal.SIGHUP)


@pytest.mark.parametrize("lost", [0, 2])
def test_a_signal_during_garbage_collection_is_not_lost(lost, monkeypatch):
  """Python prints and drops exceptions in callbacks of the garbage collector. JAX has such a callback.

  The signal is sent again. Some of these may be lost, too, just before a system call.
  """
  came, hook = [], sys.unraisablehook
  kill, sent = os.kill, []

  def send(process, number):
    sent.append(number)
    if len(sent) > lost:
      kill(process, number)

  monkeypatch.setattr(os, "kill", send)

  def callback(phase, _):
    if not came:
      came.append(phase)
      signal.raise_signal(signal.SIGTERM)

  gc.callbacks.append(callback)
  try:
    with pytest.raises(interruption.Interrupted, match="SIGTERM"), interruption.interruptible():
      gc.collect()
      time.sleep(common.LONG_S)
  finally:
    gc.callbacks.remove(callback)
  assert came and sys.unraisablehook is hook and len(sent) > lost


def test_a_signal_while_a_temporary_folder_is_made_or_removed_comes_after_it(monkeypatch):
  """So no folder is left that is not registered, and none that is half removed."""
  made = interruption.tempfile.TemporaryDirectory
  folders = []

  class Interrupting(made):

    def __init__(self, **options):
      super().__init__(**options)
      folders.append(pathlib.Path(self.name))
      if when == "made":
        signal.raise_signal(signal.SIGTERM)

    def cleanup(self):
      if when == "removed":
        signal.raise_signal(signal.SIGTERM)
      super().cleanup()

  monkeypatch.setattr(interruption.tempfile, "TemporaryDirectory", Interrupting)
  entered = []
  for when in ("made", "removed"):
    with pytest.raises(interruption.Interrupted), interruption.interruptible():
      with interruption.temporary_folder():
        entered.append(when)
  assert entered == ["removed"] and len(folders) == 2 and not any(map(os.path.exists, folders))

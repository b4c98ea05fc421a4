# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Progress of long operations, on a terminal and elsewhere."""

import contextlib
import importlib.util
import io
import logging
import os
import re
import sys
import threading
import time

import pytest

from maxtext_pp_ext.cli import output


class Stream(io.StringIO):
  """A stream that sets an event when something is written."""

  def __init__(self):
    super().__init__()
    self.written = threading.Event()

  def flush(self):
    self.written.set()


@pytest.fixture
def no_patience(monkeypatch):
  monkeypatch.setattr(output, "PATIENCE", 0.0)


def test_what_is_soon_done_is_not_shown(monkeypatch):
  monkeypatch.setattr(output, "PATIENCE", 3600.0)
  # In the test itself: between a fixture and its test pytest puts its own stream there.
  with contextlib.redirect_stderr(Stream()) as stderr, output.progress("reading") as shown:
    shown.done, shown.total = 1, 2
  assert stderr.getvalue() == ""


def test_what_takes_long_has_a_line_now_and_then_also_while_libraries_are_kept_quiet(no_patience, monkeypatch):
  monkeypatch.setattr(output, "_BETWEEN_LINES", 0.001)
  with contextlib.redirect_stderr(Stream()) as stderr, output.progress("reading") as shown, output.quiet():
    assert stderr.written.wait(60)
    shown.detail = "1.0 GiB of 24"
    stderr.written.clear()
    # One may have been on its way with what was said before.
    assert stderr.written.wait(60)
    stderr.written.clear()
    assert stderr.written.wait(60)
  lines = stderr.getvalue().splitlines()
  assert re.fullmatch(r"reading: \d+ s", lines[0]) and lines[-1].endswith(" s, 1.0 GiB of 24") and len(lines) >= 3


def test_how_much_of_how_much_is_said_in_percent(monkeypatch):
  now = time.monotonic()
  monkeypatch.setattr(output.time, "monotonic", lambda: now)
  shown = output.Progress("converting")
  shown.done, shown.total = 1, 3
  assert str(shown) == "converting: 33 %, 0 s"
  monkeypatch.setattr(output.time, "monotonic", lambda: now + 75.2)
  assert str(shown) == "converting: 33 %, 75 s"


def test_a_line_of_progress_ends_with_its_block_also_when_the_block_fails(no_patience):
  before = set(threading.enumerate())
  stderr = Stream()
  with pytest.raises(KeyboardInterrupt), contextlib.redirect_stderr(stderr), output.progress("reading"):
    assert stderr.written.wait(60)
    raise KeyboardInterrupt
  assert set(threading.enumerate()) <= before


@pytest.mark.skipif(importlib.util.find_spec("rich") is None, reason="needs the extra tools")
def test_a_terminal_has_a_bar_that_goes_when_it_is_done(no_patience, monkeypatch):
  reading, terminal = os.openpty()
  monkeypatch.setattr(output, "_BETWEEN_LOOKS", 0.01)
  said = b""
  with os.fdopen(terminal, "w") as stream:
    monkeypatch.setattr(sys, "stderr", stream)
    with output.progress("running [host]") as shown, output.quiet():
      shown.done, shown.total = 1, 2
      shown.detail = "round 3 of 7"
      while b"round 3 of 7" not in said:
        said += os.read(reading, 4096)
    stream.flush()
  rest = os.read(reading, 4096)
  os.close(reading)
  assert b"running [host]: 50 %" in said and "━".encode() in said + rest
  assert b"\x1b[2K" in rest  # the line is erased


def test_what_logs_while_it_is_quiet_can_log_later(capfd):
  with output.quiet():
    handler = logging.StreamHandler()
    handler.emit(logging.makeLogRecord({"msg": "kept from the terminal"}))
  handler.emit(logging.makeLogRecord({"msg": "and this is not"}))
  assert capfd.readouterr() == ("", "and this is not\n")

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs a command with limits of time and memory, and reports how it ended."""

from collections.abc import Callable
import contextlib
import dataclasses
import pathlib
import re
import subprocess
import time

import psutil

from maxtext_pp_ext.processes import children

GIB = 1 << 30
# The command is stopped before the operating system runs out of memory: that might kill another process.
_KEEP_FREE_BYTES = GIB // 2
_ERROR_LINE = re.compile(r"^(?:[\w.]*(?:Error|Exception|Interrupt)\b.*|.*RESOURCE_EXHAUSTED.*|.*Check fail(?:ure|ed).*)$")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
  """Limits of a command."""

  seconds: float = 1800.0  # wall time
  memory_bytes: int = 24 * GIB  # resident memory of the command and its children together


def run(
    command: list[str],
    *,
    log: pathlib.Path,
    limits: Limits,
    environment: dict[str, str] | None = None,
    on_tick: Callable[[float, int], None] = lambda seconds, memory: None,
    tick: float = 0.25,
) -> tuple[str | None, int]:
  """Runs a command that does not outlive the call or the calling process.

  Its output and errors replace the log file. Every `tick` seconds its limits are checked, and `on_tick` is called with
  the seconds so far and the resident bytes now. Returns why there is no result, None if the command succeeded; and the
  largest resident memory that was seen, in bytes.
  """
  start, peak, failure = time.monotonic(), 0, None
  with open(log, "wb") as output:
    with children.Child(command, stdout=output, stderr=subprocess.STDOUT, env=environment) as process:
      while process.poll() is None and failure is None:
        seconds, memory = time.monotonic() - start, _resident_bytes(process.pid)
        peak = max(peak, memory)
        on_tick(seconds, memory)
        failure = _over(limits, seconds, memory)
        time.sleep(tick)
      if failure is not None:
        process.cut()
  if failure is None and process.returncode != 0:
    failure = _why(process.returncode, log)
  return failure, peak


def _over(limits: Limits, seconds: float, memory: int) -> str | None:
  if memory > limits.memory_bytes:
    return f"stopped after {seconds:.0f} s: more than {limits.memory_bytes / GIB:.3g} GiB of host memory"
  if psutil.virtual_memory().available < _KEEP_FREE_BYTES:
    return f"stopped after {seconds:.0f} s: the machine had no memory left, the command used {memory / GIB:.1f} GiB"
  if seconds > limits.seconds:
    return f"stopped: more than {limits.seconds:.0f} s"
  return None


def _resident_bytes(pid: int) -> int:
  total = 0
  with contextlib.suppress(psutil.NoSuchProcess):
    process = psutil.Process(pid)
    for each in [process, *process.children(recursive=True)]:
      with contextlib.suppress(psutil.NoSuchProcess):
        total += each.memory_info().rss
  return total


def _why(returncode: int, log: pathlib.Path) -> str:
  """The last error in a failed command's log, in one line of at most 200 characters; else how the command ended."""
  lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
  if at := [index for index, line in enumerate(lines) if _ERROR_LINE.match(line.strip())]:
    text = lines[at[-1]].strip()
    if text.endswith(":"):  # a list of reasons follows
      text = " ".join(map(str.strip, lines[at[-1] : at[-1] + 2]))
    return text if len(text) <= 200 else f"{text[:199]}…"
  return f"killed by signal {-returncode}" if returncode < 0 else f"exit status {returncode}, see {log.name}"

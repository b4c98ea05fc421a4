# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""One of several processes dies: the others end with an error, soon, and a restart goes on from the last checkpoint.

The others end without help: the launcher would kill them only after `GRACE_S`, and the test would fail. A notice of
termination (SIGTERM) to one process makes all save and end. 2 stages × 2 FSDP shards, a device in each process. Each
stage is in a slice of its own.
"""

import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import pytest

from maxtext_pp_ext.checkpoint import places
from maxtext_pp_ext.testing import launch
from tests.marks import slow_but
from tests.reliability import common, dying
from tests.reliability.common import at_metrics, over_slices, pipeline, WHILE_WRITING
from tests.trainer import cases as trainer_cases
from tests.trainer.runs import Results, run_all, write_plan

PROCESSES, SLICES = 4, 2
HEARTBEAT_S, GRACE_S = 10, 60
# Checkpoints are whole when the next step begins, so what a death leaves does not depend on how fast they are written.
KEYS = over_slices(SLICES, pipeline(2, fsdp=2)) | {"async_checkpointing": False}
# A notice reaches all some steps after it came.
NOTICE_STEPS = 60
NOTICE = KEYS | {"enable_autocheckpoint": True, "checkpoint_period": 100, "steps": NOTICE_STEPS}
# name: who dies when. The first process is also the coordinator.
DEATHS = {
    "last": at_metrics(signal.SIGKILL, 4, process=3),
    "middle": at_metrics(signal.SIGKILL, 4, process=1),
    "coordinator": at_metrics(signal.SIGKILL, 4, process=0),
    "while-writing": dataclasses.replace(WHILE_WRITING["commit file"], process=0),
    "raises": at_metrics(0, 4, process=2),
}


def start(folder, plan, death):
  """Starts all processes; returns them and their output as it arrives."""
  lines = []
  group = launch.Group(
      dying.arguments(death, write_plan(folder, plan)),
      processes=PROCESSES,
      devices=1,
      slices=SLICES,
      heartbeat_s=HEARTBEAT_S,
      on_line=lambda i, line: lines.append(f"[{i}] {line}"),
      cwd=folder,
  )
  return group, lines


def running_in(folder):
  """Processes that work in this folder."""
  found = []
  for process in pathlib.Path("/proc").iterdir():
    try:
      if process.name.isdecimal() and pathlib.Path(os.readlink(process / "cwd")) == folder.resolve():
        found.append(process.name)
    except OSError:
      pass  # it has ended, or is not ours
  return found


@dataclasses.dataclass(frozen=True)
class Died:
  """The state after one process died.

  Attributes:
    codes: exit codes.
    seconds: the longest time that another process ran on.
    last: step of the last whole checkpoint.
  """

  codes: list[int]
  seconds: float
  last: int


def died(folder, name):
  group, lines = start(folder, {name: common.run(KEYS)}, DEATHS[name])
  ended = {}
  with group:
    watch = threading.Thread(target=lambda: ended.update(_ends(group.processes)))
    watch.start()
    codes = group.wait(grace_s=GRACE_S)
    watch.join()
  (folder / f"{name}.log").write_text("".join(lines), encoding="utf-8")
  assert not running_in(folder)
  seconds = max(ended.values()) - ended[DEATHS[name].process]
  return Died(codes, seconds, max(places.steps(Results(folder).checkpoints(name)), default=-1))


def _ends(processes):
  """When each ended."""
  ended = {}
  while len(ended) < len(processes):
    for i, process in enumerate(processes):
      if i not in ended and not pathlib.Path(f"/proc/{process.pid}/cwd").exists():
        ended[i] = time.monotonic()
    time.sleep(0.02)
  return ended


@pytest.fixture(scope="module")
def deaths(tmp_path_factory):
  """(results of the runs after a restart, and of one in which nobody died, called `whole`; {name: Died})."""
  folder = tmp_path_factory.mktemp("deaths")
  trainer_cases.write_data(folder)
  after = {name: died(folder, name) for name in DEATHS}
  runs = {name: common.run(KEYS) for name in ["whole", *DEATHS]}
  return run_all(folder, runs, devices=PROCESSES, processes=PROCESSES, slices=SLICES), after


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
@pytest.mark.parametrize("name", DEATHS)
def test_the_others_end_soon_and_a_restart_goes_on_bit_for_bit(deaths, name, record_property):
  results, after = deaths
  found = after[name]
  record_property("seconds that the others lived on", round(found.seconds, 1))
  assert found.codes[DEATHS[name].process] == (-DEATHS[name].signal or 1)
  assert all(found.codes), found.codes
  assert found.last == 3
  common.check_resumed(results, name, "whole", found.last, PROCESSES)


@pytest.mark.slow
def test_a_notice_of_termination_makes_all_save_and_end_and_a_restart_goes_on_bit_for_bit(tmp_path):
  trainer_cases.write_data(tmp_path)
  group, lines = start(tmp_path, {"notice": common.run(NOTICE)}, at_metrics(signal.SIGTERM, 3, process=1))
  with group:
    codes = group.wait(timeout_s=600)
  output = "".join(lines)
  assert codes == [0] * PROCESSES, output[-3000:]
  last = max(places.steps(Results(tmp_path).checkpoints("notice")))
  assert 3 < last < NOTICE_STEPS - 1 and "SIGTERM" in output
  runs = {name: common.run(NOTICE) for name in ("notice", "whole")}
  results = run_all(tmp_path, runs, devices=PROCESSES, processes=PROCESSES, slices=SLICES)
  common.check_resumed(results, "notice", "whole", last, PROCESSES, NOTICE_STEPS)


def launched(folder, *arguments):
  """A launcher started as a person starts it, once its processes wait."""
  command = [sys.executable, "-m", "maxtext_pp_ext.testing.launch", "--grace", "2", "--processes", "2", "-m"]
  environment = os.environ | {"PYTHONPATH": str(pathlib.Path(__file__).resolve().parents[2])}
  launcher = subprocess.Popen(
      [*command, "tests.reliability.waiting", *arguments], cwd=folder, env=environment, stdout=subprocess.PIPE, text=True
  )
  too_late = threading.Timer(120, launcher.kill)
  too_late.start()
  try:
    for _ in range(2):
      while not (line := launcher.stdout.readline()).endswith("waiting\n"):
        assert line, "the launcher has ended, or was killed after 120 s"
    assert len(running_in(folder)) >= 3
  except BaseException:
    launcher.kill()
    launcher.communicate()
    raise
  finally:
    too_late.cancel()
  return launcher


def gone(folder):
  """Whether, after a short wait, no process runs there any more."""
  deadline = time.monotonic() + 30
  while running_in(folder) and time.monotonic() < deadline:
    time.sleep(0.1)
  return not running_in(folder)


def test_a_launcher_that_is_killed_leaves_nothing_running_not_even_what_its_processes_have_started(tmp_path):
  with launched(tmp_path, "child") as launcher:
    assert len(running_in(tmp_path)) == 7  # the launcher, and twice a guardian, a process, and its child
    launcher.kill()
  assert gone(tmp_path)


def test_sigterm_to_the_launcher_ends_processes_that_take_no_notice(tmp_path):
  """JAX catches SIGTERM in these processes."""
  with launched(tmp_path) as launcher:
    launcher.terminate()
    assert launcher.wait(timeout=30) == 143
  assert gone(tmp_path)


@pytest.mark.parametrize(
    "how, failing",
    slow_but([("fail", 0), ("exit", 1)], [("fail", 0), ("fail", 1), ("exit", 0), ("exit", 1)], spread=True),
)
def test_the_launcher_kills_who_does_not_end_when_another_has_failed(tmp_path, how, failing):
  waiting = ["-m", "tests.reliability.waiting", f"{how}-beside", "{process}", str(failing)]
  with launch.Group(waiting, processes=2, devices=1, heartbeat_s=60, cwd=tmp_path) as group:
    with pytest.raises(TimeoutError, match=f"2 s after they should have ended, and killed: process {1 - failing}$"):
      group.wait(grace_s=2, timeout_s=300)
  assert group.processes[failing].returncode == 3 and not running_in(tmp_path)


def test_an_error_in_reading_the_output_ends_all(tmp_path):
  def fail(process, line):
    raise BrokenPipeError(f"{process} {line}")

  with launch.Group(["-m", "tests.reliability.waiting"], processes=2, devices=1, on_line=fail, cwd=tmp_path) as group:
    with pytest.raises(BrokenPipeError):
      group.wait(timeout_s=300)
  assert not running_in(tmp_path)


def test_the_launcher_reports_who_failed(capfd):
  assert launch.main(["--processes", "1", "-m", "tests.reliability.waiting", "fail"]) == 1
  assert "failed: process 0 (exit code 3)" in capfd.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [["--processes", "0", "-m", "x"], ["--devices", "0", "-m", "x"], ["--slices", "3", "-m", "x"], ["-m"], []],
)
def test_the_launcher_refuses_what_cannot_be(arguments, capsys):
  with pytest.raises(SystemExit, match="2"):
    launch.main(arguments)
  assert "error: " in capsys.readouterr().err

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""A child and all its descendants end with the parent; otherwise a child ends as its command does."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from maxtext_pp_ext.processes import children
from maxtext_pp_ext.trainer_runs import trainer
from tests.processes import common

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")

ENDS = {
    "exit code 0": ("pass", 0),
    "exit code 3": ("import sys; sys.exit(3)", 3),
    "an exception": ("raise ValueError", 1),
    "SIGKILL": ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
    "SIGABRT": ("import os; os.abort()", -signal.SIGABRT),
    "SIGTERM to its group": ("import os, signal; os.killpg(0, signal.SIGTERM)", -signal.SIGTERM),
}


def python(program, folder, **options):
  return children.Child([sys.executable, "-c", program], cwd=folder, **options)


def waiting(folder):
  """A child with two children, once these run."""
  child = python(common.PARENT, folder)
  common.until((folder / "ready").exists, "no child of the child")
  assert len(common.running_in(folder)) == 4
  return child


def gone(folder):
  common.until(lambda: not common.running_in(folder), common.running_in(folder))
  return True


@pytest.mark.parametrize("program, code", ENDS.values(), ids=ENDS.keys())
def test_a_child_ends_as_its_command_does(tmp_path, program, code):
  with python(program, tmp_path, stderr=subprocess.DEVNULL) as child:
    pass
  assert child.returncode == code


def test_output_errors_folder_and_environment_are_the_commands_and_there_is_no_input(tmp_path):
  program = "import os, sys; print(os.getcwd(), os.environ['A'], repr(sys.stdin.read())); sys.exit('oh')"
  pipe = subprocess.PIPE
  with python(program, tmp_path, stdout=pipe, stderr=pipe, text=True, env={**os.environ, "A": "1"}) as child:
    assert child.communicate(timeout=common.LONG_S) == (f"{tmp_path} 1 ''\n", "oh\n")
  assert child.returncode == 1


def test_what_cannot_be_started_says_so(tmp_path):
  with children.Child([str(tmp_path / "nothing")], stderr=subprocess.PIPE, text=True) as child:
    assert child.communicate()[1] == f"{tmp_path / 'nothing'}: No such file or directory\n"
  assert child.returncode == 127


def test_what_a_command_leaves_running_ends_with_it(tmp_path):
  with python(common.PARENT.replace(f"time.sleep({common.LONG_S})\n", "sys.exit(3)"), tmp_path) as child:
    pass
  assert child.returncode == 3 and (tmp_path / "ready").exists() and not common.running_in(tmp_path)


def test_an_exception_ends_a_child_and_all_its_descendants_with_the_context(tmp_path):
  with pytest.raises(ValueError, match="ours"), waiting(tmp_path) as child:
    raise ValueError("ours")
  assert child.returncode == -signal.SIGTERM and not common.running_in(tmp_path)


def test_what_ignores_sigterm_is_killed(tmp_path):
  with python(common.DEAF + common.SLEEP, tmp_path) as child:
    common.until((tmp_path / "deaf").exists, "it is not deaf yet")
    child.end(grace_s=0.2)
  assert child.returncode == -signal.SIGKILL and not common.running_in(tmp_path)


def test_sigterm_goes_to_the_command_alone(tmp_path):
  """The command decides what happens to its children."""
  own = "import pathlib, signal, time; signal.signal(signal.SIGTERM, lambda *_: pathlib.Path('told').touch()); "
  own += f"pathlib.Path('listens').touch(); time.sleep({common.LONG_S})"
  program = f"""
import pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, lambda *_: pathlib.Path("asked").touch())
subprocess.Popen([sys.executable, "-c", {own!r}])
while not pathlib.Path("asked").exists():
  time.sleep(0.02)
sys.exit(5)
"""
  with python(program, tmp_path) as child:
    common.until((tmp_path / "listens").exists, "no child of the child")
    child.terminate()
  assert child.returncode == 5 and not (tmp_path / "told").exists() and not common.running_in(tmp_path)


def test_a_child_ends_with_the_object_that_stands_for_it(tmp_path):
  child = waiting(tmp_path)
  del child
  assert gone(tmp_path)


def test_killing_a_child_kills_all_its_descendants(tmp_path):
  with waiting(tmp_path) as child:
    child.kill()
  assert child.returncode == -signal.SIGKILL and not common.running_in(tmp_path)


def test_a_command_whose_guardian_is_killed_ends(tmp_path):
  with python(f"open('ready', 'w').close(); {common.SLEEP}", tmp_path) as child:
    common.until((tmp_path / "ready").exists, "it has not started")
    os.kill(child.pid, signal.SIGKILL)
  assert gone(tmp_path)


LIBRARY = f"""
import pathlib, signal, sys, threading
from maxtext_pp_ext.trainer_runs import trainer
before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
run = lambda: trainer.run_python(["-c", {common.PARENT!r}], pathlib.Path("log"), devices=2)
thread = threading.Thread(target=run)
"""


@pytest.mark.parametrize("run", ["run()", "thread.start(); thread.join()"], ids=["main thread", "another thread"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL], ids=lambda number: number.name)
def test_what_a_library_function_runs_ends_with_a_process_that_handles_no_signals(tmp_path, run, number):
  """For example pytest, which SIGTERM ends immediately."""
  with common.Command(tmp_path, f"{LIBRARY}\n{run}") as command:
    command.wait_for("ready")
    assert command.code_after(number) == -number
    assert gone(tmp_path)


def test_a_thread_can_run_python_and_no_disposition_of_a_signal_changes(tmp_path):
  numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
  before, seen, failed = [signal.getsignal(number) for number in numbers], [], []

  def run(exit_code):
    look = lambda line: seen.append((line, [signal.getsignal(number) for number in numbers]))
    try:
      trainer.run_python(["-c", f"print(1); exit({exit_code})"], tmp_path / f"{exit_code}.log", devices=2, on_line=look)
    except trainer.RunFailedError as error:
      failed.append(str(error).splitlines()[-1])

  threads = [threading.Thread(target=run, args=(code,)) for code in (0, 3)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert seen == [("1\n", before)] * 2 and len(failed) == 1 and failed[0].startswith("Exit code 3;")

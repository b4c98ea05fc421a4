# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""A command that gets a signal ends all its children, removes its temporary folders, and exits with 128 + signal.

The commands are the real ones. Their child, which would compile or train for minutes, is replaced by one that sleeps and
has itself started two: one in a separate session, and one that ignores SIGTERM. The guardian is the real one.
"""

import signal
import sys

import pytest

from maxtext_pp_ext.processes import interruption
from tests.host.common import TINY
from tests.marks import slow_but
from tests.processes import common

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")

# In the place of whatever the command would run in a process of its own.
SLEEPING = f"""
import os, sys
from maxtext_pp_ext.processes import children

class Sleeping(children.Child):

  def __init__(self, command, here=os.getcwd(), **options):
    super().__init__([sys.executable, "-c", {common.PARENT!r}], **(options | {{"cwd": here}}))

children.Child = Sleeping
"""
CLI = """
from maxtext_pp_ext.cli import main, compare, plan
compare._target = lambda args, names, *_: compare.Target(
    devices=4, described="4 devices", arguments={name: [] for name in names}
)
"""
MODULE = """
import runpy
sys.argv = {1!r}
runpy.run_module({0!r}, run_name="__main__", alter_sys=True)
"""
BENCHMARK = ["benchmark", "--impl", "circular_bsw", "--output", "figures"]
COMMANDS = {
    "compare": CLI + 'sys.exit(main(["compare", "steps=1", "--impl", "none,circular"]))',
    "compare --run": f"""{CLI}
compare._row = lambda *_: {{"arguments": []}}
sys.exit(main(["compare", "steps=1", "--impl", "none", "--run"]))
""",
    "plan --validate": f"""{CLI}
import types
from maxtext_pp_ext.host.models import variants
variants.arguments = lambda *_, **__: []
one = types.SimpleNamespace(impl="none", keys={{}}, schedule=None)
found = types.SimpleNamespace(
    devices=4, slice=None, memory_limit=None, host_limit=None, not_counted=[], chip=None, infeasible=[], candidates=[one],
    fits=lambda each: True, distinct=lambda: [one]
)
plan._plan, plan._as_dict = lambda *_: found, lambda *_: {{}}
sys.exit(main(["plan", "compile_topology=v5p-8", "--validate", "1"]))
""",
    "demo": MODULE.format("examples.demo", ["demo", "--output", "output"]),
    "compiler_figures": MODULE.format("benchmarks.compiler_figures", BENCHMARK),
    "overlap": MODULE.format("benchmarks.overlap", BENCHMARK),
    "scaling": MODULE.format("benchmarks.scaling", BENCHMARK),
    "mutants": MODULE.format("tests.mutants", ["mutants", "--only", "nan-agrees"]),
}
WITHOUT_FOLDERS = {"demo"}
# Commands that start in a second or two. The others are those of `maxtext-pp`.
QUICK = COMMANDS.keys() - {"compare", "compare --run", "plan --validate"}
# `maxtext-pp compare`, and what starts the same children without importing MaxText.
EITHER = pytest.mark.parametrize(
    "program", slow_but(["scaling"], {each: COMMANDS[each] for each in ("compare", "scaling")})
)


def started(folder, program):
  """A command whose child has started its two children."""
  command = common.Command(folder, SLEEPING + program)
  try:
    command.wait_for("ready")
    assert len(command.running()) == 5, command.running()  # the command, a guardian, the child, its two
  except BaseException:
    command.__exit__()
    raise
  return command


def check_gone(command, by="SIGTERM"):
  assert command.running() == [] and command.left() == []
  assert command.said.splitlines()[-1].endswith(f"interrupted by {by}") and "Traceback" not in command.said


@pytest.mark.parametrize("name", slow_but(QUICK | {"compare"}, list(COMMANDS)))
def test_a_command_that_is_asked_to_end_leaves_nothing_running_and_no_temporary_folder(tmp_path, name):
  with started(tmp_path, COMMANDS[name]) as command:
    assert bool(command.left()) == (name not in WITHOUT_FOLDERS)
    assert command.code_after(signal.SIGTERM) == 143, command.said
    check_gone(command)


@EITHER
@pytest.mark.parametrize("name, code", [("SIGHUP", 129), ("SIGINT", 130)])
def test_a_command_whose_terminal_closes_or_that_alone_is_interrupted_leaves_nothing(tmp_path, name, code, program):
  with started(tmp_path, program) as command:
    assert command.code_after(signal.Signals[name]) == code, command.said
    check_gone(command, name)


@EITHER
def test_more_signals_do_not_disturb_what_cleans_up(tmp_path, program):
  """A terminal that closes sends SIGHUP twice, a service manager SIGTERM and SIGHUP."""
  with started(tmp_path, program) as command:
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGHUP, signal.SIGTERM):
      command.process.send_signal(number)
    common.until(lambda: command.process.poll() is not None, command.said)
    assert command.process.returncode in (128 + signal.SIGHUP, 128 + signal.SIGTERM), command.said
    assert command.running() == [] and command.left() == []


@EITHER
def test_under_nohup_a_closed_terminal_does_not_end_it(tmp_path, program):
  with started(tmp_path, f"import signal\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)\n{program}") as command:
    command.process.send_signal(signal.SIGHUP)
    assert command.code_after(signal.SIGTERM) == 143, command.said  # and not 129: the first signal is the one that counts
    check_gone(command)


@pytest.mark.parametrize("name", slow_but(QUICK, ["compare", "demo", "mutants"]))
def test_a_command_that_is_killed_leaves_nothing_running(tmp_path, name):
  with started(tmp_path, COMMANDS[name]) as command:
    command.code_after(signal.SIGKILL)
    common.until(lambda: command.running() == [], command.running())


@pytest.mark.slow
@pytest.mark.parametrize("name", [number.name for number in interruption.SIGNALS])
def test_a_signalled_comparison_of_real_steps_leaves_nothing_running(tmp_path, name):
  keys = [*TINY, "ici_pipeline_parallelism=2", "num_pipeline_microbatches=2"]
  program = f"from maxtext_pp_ext import cli\nimport sys\nsys.exit(cli.main({['compare', *keys, '--devices', '4']!r}))"
  with common.Command(tmp_path, program) as command:
    compiling = lambda: any("maxtext_pp_ext.compiled.tasks" in words for words in command.running())
    common.until(lambda: compiling() or command.process.poll() is not None, command.said)
    assert command.left(), command.said
    assert command.code_after(signal.Signals[name]) == 128 + signal.Signals[name], command.said
    check_gone(command, name)

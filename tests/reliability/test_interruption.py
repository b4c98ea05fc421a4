# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Training that was killed resumes as if it had not been, bit for bit; in another layout, within float32."""

import dataclasses
import shutil
import signal

import pytest

from maxtext_pp_ext import cli
from maxtext_pp_ext.checkpoint import places
from maxtext_pp_ext.host.models import run_config
from maxtext_pp_ext.trainer_runs import trainer
from tests.reliability import common, dying
from tests.reliability.common import at_metrics, pipeline, STEPS, WHILE_WRITING
from tests.trainer import cases as trainer_cases
from tests.trainer.runs import Results, run_all, write_plan

DEVICES = 6
OURS = pipeline(3, fsdp=2)
# float32 through a few layers and updates; the loss moves by more than a hundred times as much from step to step.
BOUND = 2e-5
# name: (death, the last checkpoint that is whole then, if that does not depend on how fast it is written).
DEATHS = {
    "commit": (WHILE_WRITING["commit"], 3),
    "first commit": (dataclasses.replace(WHILE_WRITING["commit"], path="/0.orbax-checkpoint-tmp"), -1),
    **{name: (death, 3) for name, death in WHILE_WRITING.items() if name != "commit"},
    "SIGTERM at the commit file": (dataclasses.replace(WHILE_WRITING["commit file"], signal=signal.SIGTERM), 3),
    "SIGKILL in a step": (at_metrics(signal.SIGKILL, 5), None),
    "SIGTERM in a step": (at_metrics(signal.SIGTERM, 5), None),
    "SIGKILL after the first": (at_metrics(signal.SIGKILL, 0), None),
}
QUICK = "commit"


def run_name(name):
  return name.replace(" ", "-")


def interrupted(folder, names, keys=OURS):
  """Runs trainings until they are killed. Returns {name: the last whole checkpoint}."""
  last = {}
  for name in names:
    death, _ = DEATHS[name]
    run = {run_name(name): common.run(keys)}
    arguments = dying.arguments(death, write_plan(folder, run))
    with pytest.raises(trainer.RunFailedError, match=f"Exit code -{death.signal};"):
      trainer.run_python(arguments, folder / f"{run_name(name)}.log", devices=DEVICES, cwd=folder)
    last[name] = max(places.steps(Results(folder).checkpoints(run_name(name))), default=-1)
  return last


@dataclasses.dataclass(frozen=True)
class Resumed:
  """Results of runs after they were resumed, and of one that was not interrupted, called `whole`."""

  results: object
  last: dict[str, int]


def resumed(folder, names):
  trainer_cases.write_data(folder)
  last = interrupted(folder, names)
  runs = {run_name(name): common.run(OURS) for name in ["whole", *names]}
  return Resumed(run_all(folder, runs, devices=DEVICES), last)


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
  return resumed(tmp_path_factory.mktemp("quick"), [QUICK])


@pytest.fixture(scope="module")
def every(tmp_path_factory):
  return resumed(tmp_path_factory.mktemp("every"), DEATHS)


def check(found, name):
  _, last = DEATHS[name]
  assert last in (None, found.last[name])
  common.check_resumed(found.results, run_name(name), "whole", found.last[name])


@pytest.mark.slow
def test_a_run_that_was_killed_while_it_wrote_a_checkpoint_goes_on_from_the_one_before_bit_for_bit(quick):
  check(quick, QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("name", DEATHS)
def test_a_run_that_was_killed_goes_on_bit_for_bit(every, name):
  check(every, name)


OTHERS = {
    "other stages": (OURS, pipeline(2, fsdp=3)),
    "no pipeline": (OURS, {"ici_fsdp_parallelism": DEVICES}),
    "host": (OURS, pipeline(3, implementation="host", fsdp=2)),
    "from host": (pipeline(3, implementation="host", fsdp=2), OURS),
    "gathered once": (OURS, pipeline(3, implementation="circular_ag_once", fsdp=2)),
}
CONVERTED = ("other stages", "no pipeline")


@pytest.fixture(scope="module")
def switched(tmp_path_factory):
  """Runs killed in one layout or implementation and resumed in another, converted if the layout differs."""
  folder = tmp_path_factory.mktemp("switched")
  trainer_cases.write_data(folder)
  runs, last = {"whole": common.run(OURS)}, {}
  for before in (OURS, pipeline(3, implementation="host", fsdp=2)):
    last[before["pipeline_impl"]] = interrupted(folder, [QUICK], before)[QUICK]
    for name, (first, after) in OTHERS.items():
      if first != before:
        continue
      source, destination = (Results(folder).checkpoints(run_name(each)) for each in (QUICK, name))
      runs[run_name(name)] = common.run(after)
      if name in CONVERTED:
        keys = [str(run_config.base_yml()), *common.run(after).keys]
        assert cli.main(["convert", str(source), str(destination), *keys]) == 0
      else:
        shutil.copytree(source, destination)
    shutil.rmtree(Results(folder).checkpoints(run_name(QUICK)))
  assert set(last.values()) == {3}
  return run_all(folder, runs, devices=DEVICES)


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_a_run_that_was_killed_goes_on_with_other_stages_or_another_implementation(switched, name):
  whole, found = (dict(common.by_step(switched, run)) for run in ("whole", run_name(name)))
  assert list(found) == list(range(4, STEPS))
  for metric in trainer_cases.TRAIN_METRICS:
    ours, expected = ([learnt[step][metric] for step in found] for learnt in (found, whole))
    assert ours == pytest.approx(expected, rel=BOUND), metric
    assert abs(expected[-1] - expected[0]) > 100 * BOUND * expected[0]

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Trains many runs of MaxText's trainers in one process, since importing them takes longer than training a tiny model.

`run_all` starts `python -m tests.trainer.runs PLAN`; PLAN is the JSON that it writes. All runs may
also be in several joined processes.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import importlib
import json
import pathlib
import sys
import traceback
from typing import Any

import numpy as np

import maxtext_pp_ext
from maxtext_pp_ext.trainer_runs import trainer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
  """One training run."""

  keys: Sequence[str]  # MaxText's `key=value` arguments; without a yml file in front, base.yml is read
  trainer: str = trainer.PRE_TRAIN  # the module whose `main` trains
  weights: str | None = None  # name of the weights from which it starts; None for those that MaxText draws
  rounding: float = 0.0  # if not 0, each weight is first moved by this fraction of itself, up or down at random


_METRICS = "metrics"  # folder with a folder per run, which has a file per process
_OUTPUT = "out"  # MaxText's base_output_directory


@dataclasses.dataclass(frozen=True)
class Results:
  """The files that runs left in a folder."""

  folder: pathlib.Path

  def error(self, run: str) -> str | None:
    """Returns the traceback of a failed run, or None."""
    file = self.folder / f"{run}.error"
    return file.read_text(encoding="utf-8") if file.exists() else None

  def checkpoints(self, run: str) -> pathlib.Path:
    return self.folder / _OUTPUT / run / "checkpoints"

  def metrics_files(self, run: str) -> list[pathlib.Path]:
    """Returns the metrics file of each process, in the order of processes."""
    return sorted((self.folder / _METRICS / run).glob("*.jsonl"), key=lambda file: int(file.stem))

  def metrics(self, run: str, *having: str) -> list[dict[str, float]]:
    """Returns the run's metrics of steps and evaluations, in order; see `trainer.read_metrics`.

    Raises:
      RunFailedError: the run failed, or its processes report different metrics.
    """
    if error := self.error(run):
      raise trainer.RunFailedError(f"{run}: {error}")
    files = self.metrics_files(run)
    if not files:
      raise trainer.RunFailedError(f"{run} has trained no step; its log: {self.folder / 'runs.log'}")
    return trainer.read_metrics(files, *having)


def run_all(
    folder: pathlib.Path,
    runs: Mapping[str, Run],
    *,
    devices: int,
    processes: int = 1,
    slices: int = 1,
    weights: Mapping[str, Sequence[str]] | None = None,
) -> Results:
  """Trains all runs, one after another, in one new process with this many virtual CPU devices.

  Args:
    folder: where everything is written.
    runs: name -> run. A failed run leaves its error and does not stop the others. Exception: several processes must stay
      together, so there it stops them.
    devices, processes, slices: number of virtual devices, of joined processes, which share these equally, and of virtual
      slices, which share the processes equally.
    weights: name -> MaxText's keys of a model without a pipeline; its initial weights get this name. A run that names
      them gets the same numbers in the layout of its own keys.
  """
  arguments = ["-m", "tests.trainer.runs", write_plan(folder, runs, weights)]
  trainer.run_python(arguments, folder / "runs.log", devices=devices, processes=processes, slices=slices, cwd=folder)
  return Results(folder)


def write_plan(folder: pathlib.Path, runs: Mapping[str, Run], weights: Mapping[str, Sequence[str]] | None = None) -> str:
  """Writes the plan of `run_all` into a file in this folder, for `main`; returns the name of the file."""
  for name in runs:
    (folder / f"{name}.error").unlink(missing_ok=True)  # of an earlier run that this one continues
  plan = {"weights": weights or {}, "runs": {name: dataclasses.asdict(run) for name, run in runs.items()}}
  (folder / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
  return "plan.json"


def main(plan_file: str) -> None:
  maxtext_pp_ext.install()
  from absl import logging  # pylint: disable=import-outside-toplevel
  import jax  # pylint: disable=import-outside-toplevel

  from examples.demo import weights as initial  # pylint: disable=import-outside-toplevel

  logging.use_absl_handler()  # as absl's app.run does
  logging.set_verbosity(logging.INFO)
  _keep_metrics_of_training()
  plan = json.loads(pathlib.Path(plan_file).read_text(encoding="utf-8"))
  draw = functools.cache(lambda name: initial.draw(_argv(plan["weights"][name], "weights")))
  for name, fields in plan["runs"].items():
    try:
      _train(name, Run(**fields), draw)
    except (Exception, SystemExit):  # MaxText ends the process if a loss is NaN
      pathlib.Path(f"{name}.error").write_text(traceback.format_exc(), encoding="utf-8")
      if jax.process_count() > 1:
        raise


def _train(name: str, run: Run, draw: Callable[[str], Any]) -> None:
  import jax  # pylint: disable=import-outside-toplevel

  from examples.demo import weights as initial  # pylint: disable=import-outside-toplevel

  print(f"== {name}", flush=True)
  argv = _argv(run.keys, name)
  if run.weights is not None:
    path = pathlib.Path("weights", name).resolve()
    tree, layout = draw(run.weights)
    initial.save(path, initial.in_layout_of(moved(tree, run.rounding), layout, argv))
    argv.append(f"load_parameters_path={path / 'items'}")
  metrics = pathlib.Path(_METRICS, name, f"{jax.process_index()}.jsonl")
  metrics.parent.mkdir(parents=True, exist_ok=True)
  importlib.import_module(run.trainer).main([*argv, f"metrics_file={metrics}"])


def moved(tree: Any, fraction: float) -> Any:
  """Returns weights, each number moved by this fraction of itself, up or down at random."""
  if fraction == 0:
    return tree
  import jax  # pylint: disable=import-outside-toplevel

  random = np.random.default_rng(0)

  def move(leaf: np.ndarray) -> np.ndarray:
    return (leaf * (1 + fraction * random.choice([-1.0, 1.0], leaf.shape))).astype(leaf.dtype)

  return jax.tree.map(move, tree)


def _argv(keys: Sequence[str], name: str) -> list[str]:
  output = pathlib.Path(_OUTPUT).absolute()  # Orbax needs an absolute path
  return ["", *keys, f"run_name={name}", f"base_output_directory={output}"]


def _keep_metrics_of_training() -> None:
  """Keeps metrics of training: MaxText 0.2.5 empties its metrics file also at step 0 of every evaluation."""
  from maxtext.common import metric_logger  # pylint: disable=import-outside-toplevel

  write = metric_logger.MetricLogger.write_metrics_locally

  def keep(self, metrics, step):
    file = pathlib.Path(self.config.metrics_file)
    before = file.read_text(encoding="utf-8") if step == 0 and file.exists() else None
    write(self, metrics, step)
    if before is not None:
      file.write_text(before + file.read_text(encoding="utf-8"), encoding="utf-8")

  metric_logger.MetricLogger.write_metrics_locally = keep


if __name__ == "__main__":
  main(sys.argv[1])

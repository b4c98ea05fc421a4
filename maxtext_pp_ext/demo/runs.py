# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The demo's processes: one that prepares text and weights, then MaxText's trainer as a user starts it, twice."""

from collections.abc import Callable
import json
import pathlib
import re
import shlex
import subprocess
import sys

from maxtext_pp_ext.demo import settings as demo_settings

_STEP = re.compile(r"completed step: (\d+),.* loss: (\S+), lm_loss")
_LOG_LINES_IN_ERROR = 25


class RunFailedError(RuntimeError):
  """A process of the demo failed, or did something else than it was asked to."""


def prepare(settings: demo_settings.Settings) -> dict[str, int]:
  """Writes text and weights. Returns how many `topics`, `characters` and `parameters` there are."""
  arguments = ["-m", "maxtext_pp_ext.demo.prepare", str(settings.output), str(settings.steps)]
  _run(settings.log_file("prepare"), arguments, lambda line: None)
  return json.loads(settings.summary_file.read_text(encoding="utf-8"))


def train(
    settings: demo_settings.Settings,
    name: str,
    keys: list[str],
    on_step: Callable[[int, float], None],
    *,
    expect: str | None = None,
) -> list[float]:
  """Trains `name` (also the name of its weights' layout) and returns the loss of every step.

  `on_step(step, loss)` is called while it trains, with the loss rounded as MaxText's log has it. Raises RunFailedError
  if the trainer fails or skips a step, or if no line of its log has `expect` in it.
  """
  metrics = settings.metrics_file(name)
  metrics.unlink(missing_ok=True)  # a run that dies early must not be judged by the file of an earlier one
  own_keys = {
      "run_name": name,
      "metrics_file": metrics,
      "load_parameters_path": settings.weights(name) / "items",
  }
  base = demo_settings.maxtext_folder() / "configs" / "base.yml"
  module = ["-m", "maxtext.trainers.pre_train.train", str(base)]
  met_expectation = expect is None

  def follow(line: str) -> None:
    nonlocal met_expectation
    met_expectation = met_expectation or expect in line
    if match := _STEP.search(line):
      on_step(int(match[1]), float(match[2]))

  log = settings.log_file(name)
  _run(log, [*module, *keys, *settings.shared_keys(), *demo_settings.as_arguments(own_keys)], follow)
  losses = read_losses(metrics) if metrics.exists() else []
  if len(losses) != settings.steps:
    raise RunFailedError(f"The {name} run reported {len(losses)} of {settings.steps} steps; its log: {log}")
  if not met_expectation:
    raise RunFailedError(f"The {name} run's log says nowhere {expect!r}, so it did not run what was asked for: {log}")
  return losses


def read_losses(metrics_file: pathlib.Path) -> list[float]:
  with open(metrics_file, encoding="utf-8") as lines:
    return [json.loads(line)["learning/loss"] for line in lines]


def _run(log_file: pathlib.Path, arguments: list[str], on_line: Callable[[str], None]) -> None:
  """Runs this Python with `arguments`. The log file has the command, then all output, and is quoted in the error."""
  arguments = [sys.executable, *arguments]
  with (
      open(log_file, "w", encoding="utf-8") as log,
      subprocess.Popen(
          arguments,
          env=demo_settings.environment(),
          stdin=subprocess.DEVNULL,
          stdout=subprocess.PIPE,
          stderr=subprocess.STDOUT,
          text=True,
          errors="replace",
      ) as process,
  ):
    log.write(f"$ {shlex.join(arguments)}\n")
    try:
      for line in process.stdout or ():
        log.write(line)
        on_line(line)
    except BaseException:
      process.terminate()
      raise
  if process.returncode:
    tail = log_file.read_text(encoding="utf-8").splitlines()[-_LOG_LINES_IN_ERROR:]
    raise RunFailedError("\n".join([*tail, f"Exit code {process.returncode}; all of the log: {log_file}"]))

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Starts the demo's processes: one prepares text and weights; then MaxText's trainer runs twice, as a user starts it."""

from collections.abc import Callable
import json
import re

from maxtext_pp_ext.demo import settings as demo_settings
from maxtext_pp_ext.trainer_runs import trainer

# With several processes, only lines of the first: all report the same.
_STEP = re.compile(r"(?:\[0\] )?[^\[].*completed step: (\d+),.* loss: (\S+), lm_loss")


def prepare(settings: demo_settings.Settings) -> dict[str, int]:
  """Writes text and weights. Returns the numbers of `topics`, `characters` and `parameters`."""
  own = [str(settings.output), str(settings.steps), settings.pipeline_impl, *settings.extra_keys]
  arguments = ["-m", "maxtext_pp_ext.demo.prepare", *own]
  trainer.run_python(arguments, settings.log_file("prepare"), devices=demo_settings.DEVICES)
  return json.loads(settings.summary_file.read_text(encoding="utf-8"))


def train(
    settings: demo_settings.Settings,
    name: str,
    keys: list[str],
    on_step: Callable[[int, float], None],
    *,
    expect: str | None = None,
    processes: int = 1,
) -> list[float]:
  """Trains `name` (also the name of its weights' layout) and returns the loss of every step.

  `on_step(step, loss)` is called during training, with the loss rounded as in MaxText's log. Raises RunFailedError if the
  trainer fails or skips a step, or if no line of its log contains `expect`.
  """
  metrics = [settings.metrics_file(name, process) for process in range(processes)]
  for file in metrics:
    file.unlink(missing_ok=True)  # a run that dies early must not be judged by an older file
  own_keys = {
      "run_name": name,
      "metrics_file": settings.metrics_file(name, 0 if processes == 1 else "{process}"),
      "load_parameters_path": trainer.parameters_path(settings.weights(name)),
  }

  def follow(line: str) -> None:
    if match := _STEP.match(line):
      on_step(int(match[1]), float(match[2]))

  log = settings.log_file(name)
  arguments = ["-m", trainer.PRE_TRAIN, *keys, *settings.shared_keys(), *trainer.as_arguments(own_keys)]
  trainer.run_python(arguments, log, devices=demo_settings.DEVICES, processes=processes, on_line=follow)
  reported = trainer.read_metrics(metrics, "learning/loss") if metrics[0].exists() else []
  losses = [m["learning/loss"] for m in reported]
  if len(losses) != settings.steps:
    raise trainer.RunFailedError(f"The {name} run reported {len(losses)} of {settings.steps} steps; its log: {log}")
  if expect is not None and expect not in log.read_text(encoding="utf-8"):
    raise trainer.RunFailedError(
        f"The {name} run's log does not contain {expect!r}, so it did not run what was asked for: {log}"
    )
  return losses

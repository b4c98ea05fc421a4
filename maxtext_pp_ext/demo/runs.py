# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The demo's processes: one that prepares text and weights, then MaxText's trainer as a user starts it, twice."""

from collections.abc import Callable
import json
import re

from maxtext_pp_ext.host import run_config
from maxtext_pp_ext.demo import settings as demo_settings
from maxtext_pp_ext.testing import trainer

_STEP = re.compile(r"completed step: (\d+),.* loss: (\S+), lm_loss")


def prepare(settings: demo_settings.Settings) -> dict[str, int]:
  """Writes text and weights. Returns how many `topics`, `characters` and `parameters` there are."""
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
      "load_parameters_path": trainer.parameters_path(settings.weights(name)),
  }
  module = ["-m", trainer.PRE_TRAIN, str(run_config.base_yml())]
  met_expectation = expect is None

  def follow(line: str) -> None:
    nonlocal met_expectation
    met_expectation = met_expectation or expect in line
    if match := _STEP.search(line):
      on_step(int(match[1]), float(match[2]))

  log = settings.log_file(name)
  arguments = [*module, *keys, *settings.shared_keys(), *trainer.as_arguments(own_keys)]
  trainer.run_python(arguments, log, devices=demo_settings.DEVICES, on_line=follow)
  losses = [m["learning/loss"] for m in trainer.read_metrics(metrics)] if metrics.exists() else []
  if len(losses) != settings.steps:
    raise trainer.RunFailedError(f"The {name} run reported {len(losses)} of {settings.steps} steps; its log: {log}")
  if not met_expectation:
    raise trainer.RunFailedError(
        f"The {name} run's log says nowhere {expect!r}, so it did not run what was asked for: {log}"
    )
  return losses

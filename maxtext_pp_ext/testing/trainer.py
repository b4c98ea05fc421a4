# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""MaxText's trainers in processes of their own: how they are started, and what they report.

Nothing here imports JAX or MaxText, so that a caller need not have them, and keeps its own devices.
"""

from collections.abc import Callable, Mapping
import json
import os
import pathlib
import shlex
import subprocess
import sys

from maxtext_pp_ext import processes

PRE_TRAIN = "maxtext.trainers.pre_train.train"
SFT = "maxtext.trainers.post_train.sft.train_sft_native"
_LOG_LINES_IN_ERROR = 25


class RunFailedError(RuntimeError):
  """A process failed, or did something else than it was asked to."""


def as_arguments(keys: Mapping[str, object]) -> list[str]:
  return [f"{key}={value}" for key, value in keys.items()]


def parameters_path(checkpoint: pathlib.Path) -> pathlib.Path:
  """What `load_parameters_path` takes for a checkpoint written by `weights.save`."""
  return checkpoint / "items"


def environment(devices: int) -> dict[str, str]:
  """This process's environment, with virtual CPU devices for JAX and no Google Cloud packages for MaxText.

  This package is found first, also where it is a checkout that is not installed.
  """
  return os.environ | {
      "PYTHONPATH": processes.python_path(),
      "XLA_FLAGS": processes.xla_flags(devices),
      "JAX_PLATFORMS": "cpu",
      "DECOUPLE_GCLOUD": "TRUE",
  }


def run_python(
    arguments: list[str],
    log_file: pathlib.Path,
    *,
    devices: int,
    on_line: Callable[[str], None] = lambda line: None,
    cwd: pathlib.Path | None = None,
) -> None:
  """Runs this Python with `arguments`; `on_line` sees each line of its output while it runs.

  The log file has the command, then all output.

  Raises:
    RunFailedError: with the end of the log, if the exit code is not 0.
  """
  arguments = [sys.executable, *arguments]
  with (
      open(log_file, "w", encoding="utf-8") as log,
      subprocess.Popen(
          arguments,
          env=environment(devices),
          cwd=cwd,
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


def read_metrics(metrics_file: pathlib.Path, *having: str) -> list[dict[str, float]]:
  """The lines of a trainer's `metrics_file` with all these metrics: `learning/…` of steps, `eval/…` of evaluations."""
  with open(metrics_file, encoding="utf-8") as lines:
    return [metrics for line in lines if set(having) <= set(metrics := json.loads(line))]

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""MaxText's trainers in processes of their own: how they are started, and what they report.

Nothing here imports JAX or MaxText, so that a caller need not have them, and keeps its own devices.
"""

from collections.abc import Callable, Mapping, Sequence
import json
import os
import pathlib
import shlex
import subprocess
import sys

from maxtext_pp_ext import processes
from maxtext_pp_ext.processes import children

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
    processes: int = 1,
    on_line: Callable[[str], None] = lambda line: None,
    cwd: pathlib.Path | None = None,
) -> None:
  """Runs this Python with `arguments`; `on_line` sees each line of its output while it runs.

  The log file has the command, then all output. With several processes, which have equally many of the devices,
  `arguments` are `-m MODULE …`, and each line has a process's number in front; see `launch`.

  What is run ends with this call, and with this process; see `children`. Can be called in any thread.

  Raises:
    RunFailedError: with the end of the log, if the exit code is not 0.
  """
  if devices % processes:
    raise ValueError(f"{processes} processes cannot share {devices} devices equally")
  if processes > 1:
    shared = ["--processes", str(processes), "--devices", str(devices // processes)]
    arguments = ["-m", "maxtext_pp_ext.testing.launch", *shared, *arguments]
  arguments = [sys.executable, *arguments]
  with (
      open(log_file, "w", encoding="utf-8") as log,
      children.Child(
          arguments,
          env=environment(devices),
          cwd=cwd,
          stdout=subprocess.PIPE,
          stderr=subprocess.STDOUT,
          text=True,
          errors="replace",
      ) as process,
  ):
    log.write(f"$ {shlex.join(arguments)}\n")
    for line in process.stdout or ():
      log.write(line)
      on_line(line)
  if process.returncode:
    tail = log_file.read_text(encoding="utf-8").splitlines()[-_LOG_LINES_IN_ERROR:]
    raise RunFailedError("\n".join([*tail, f"Exit code {process.returncode}; all of the log: {log_file}"]))


def read_metrics(metrics_files: Sequence[pathlib.Path], *having: str) -> list[dict[str, float]]:
  """The lines of a trainer's `metrics_file` with all these metrics: `learning/…` of steps, `eval/…` of evaluations.

  Args:
    metrics_files: one of each process (MaxText 0.2.5 writes it in all of them).
    having: names of metrics.

  Raises:
    RunFailedError: the processes do not all report the same, times aside.
  """
  of_processes = [_read(file, having) for file in metrics_files]
  for file, metrics in zip(metrics_files, of_processes, strict=True):
    if [_learnt(m) for m in metrics] != [_learnt(m) for m in of_processes[0]]:
      raise RunFailedError(f"Two processes of a run report different metrics: {metrics_files[0]} and {file}")
  return of_processes[0]


def _read(metrics_file: pathlib.Path, having: Sequence[str]) -> list[dict[str, float]]:
  with open(metrics_file, encoding="utf-8") as lines:
    return [metrics for line in lines if set(having) <= set(metrics := json.loads(line))]


def _learnt(metrics: Mapping[str, float]) -> dict[str, float]:
  return {name: value for name, value in metrics.items() if "/step_time" not in name and not name.startswith("perf/")}

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Starts MaxText's trainers in separate processes, writes what they read, and reads what they report.

Importing this imports neither JAX nor MaxText, so a caller need not have them, and keeps its own devices.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import json
import os
import pathlib
import shlex
import sys

from maxtext_pp_ext import processes
from maxtext_pp_ext.processes import children

PRE_TRAIN = "maxtext.trainers.pre_train.train"
_LOG_LINES_IN_ERROR = 25


class RunFailedError(RuntimeError):
  """A process failed, or did not do what it was asked to do."""


def as_arguments(keys: Mapping[str, object]) -> list[str]:
  return [f"{key}={value}" for key, value in keys.items()]


def write_records(path: pathlib.Path, examples: Iterable[Mapping[str, str | Sequence[int]]]) -> None:
  """Writes a file for MaxText's Grain input: one `tf.train.Example` per example; a feature is text or token ids."""
  from array_record.python.array_record_module import ArrayRecordWriter  # pylint: disable=import-outside-toplevel
  from maxtext.input_pipeline.protos import example_pb2  # pylint: disable=import-outside-toplevel

  path.parent.mkdir(parents=True, exist_ok=True)
  # Records in groups of one can be read in any order, which MaxText's shuffle needs.
  writer = ArrayRecordWriter(str(path), "group_size:1")
  for features in examples:
    example = example_pb2.Example()
    for name, value in features.items():
      if isinstance(value, str):
        example.features.feature[name].bytes_list.value.append(value.encode())
      else:
        example.features.feature[name].int64_list.value.extend(value)
    writer.write(example.SerializeToString())
  writer.close()


def environment(devices: int) -> dict[str, str]:
  """Returns this process's environment, with virtual CPU devices for JAX and no Google Cloud packages for MaxText."""
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
    slices: int = 1,
    on_line: Callable[[str], None] = lambda line: None,
    cwd: pathlib.Path | None = None,
) -> None:
  """Runs this Python with `arguments`; `on_line` sees each line of its output while it runs.

  The log file has the command, then all output. With several processes, which share the devices equally, `arguments` are
  `-m MODULE …`, and each line begins with the number of a process; see `launch`. Slices share the processes equally.

  The started processes end with this call, and with this process; see `children`. Any thread may call this function.
  Raises RunFailedError, with the end of the log, if the exit code is not 0, and ValueError if the processes cannot share
  the devices equally.
  """
  if devices % processes:
    raise ValueError(f"{processes} processes cannot share {devices} devices equally")
  if processes > 1 or slices > 1:
    shared = ["--processes", str(processes), "--devices", str(devices // processes), "--slices", str(slices)]
    arguments = ["-m", "maxtext_pp_ext.testing.launch", *shared, *arguments]
  arguments = [sys.executable, *arguments]
  with (
      open(log_file, "w", encoding="utf-8") as log,
      children.Child(arguments, env=environment(devices), cwd=cwd, **children.LINES) as process,
  ):
    log.write(f"$ {shlex.join(arguments)}\n")
    for line in process.stdout or ():
      log.write(line)
      on_line(line)
  if process.returncode:
    tail = log_file.read_text(encoding="utf-8").splitlines()[-_LOG_LINES_IN_ERROR:]
    raise RunFailedError("\n".join([*tail, f"Exit code {process.returncode}; all of the log: {log_file}"]))


def read_metrics(metrics_files: Sequence[pathlib.Path], *having: str) -> list[dict[str, float]]:
  """Returns the lines of a trainer's `metrics_file` that have all these metrics.

  Metrics of steps begin with `learning/`, those of evaluations with `eval/`. There is a file per process: MaxText 0.2.5
  writes it in all of them. Raises RunFailedError if processes report different metrics, times aside.
  """
  found: list[list[dict[str, float]]] = []
  for file in metrics_files:
    lines = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    found.append([metrics for metrics in lines if set(having) <= metrics.keys()])
    if list(map(_learnt, found[-1])) != list(map(_learnt, found[0])):
      raise RunFailedError(f"Two processes of a run report different metrics: {metrics_files[0]} and {file}")
  return found[0]


def _learnt(metrics: Mapping[str, float]) -> dict[str, float]:
  return {name: value for name, value in metrics.items() if "/step_time" not in name and not name.startswith("perf/")}

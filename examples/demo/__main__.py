# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Trains one small model on real text, with a pipeline and without, and fails if the loss curves differ.

Both runs are MaxText's own trainer, started by its usual command in a separate process. They share the text (the language
reference inside every CPython), its order, the initial weights, and every key except those of the mesh and the pipeline.
"""

import argparse
from collections.abc import Sequence
import importlib.util
import json
import math
import pathlib
import re
import sys
import time

from examples.demo import settings as demo_settings
from maxtext_pp_ext import installed
from maxtext_pp_ext.processes import interruption
from maxtext_pp_ext.trainer_runs import trainer

# float32: the distance from 1 to the next number.
EPSILON = 2.0**-23
# Matrix products, normalisations and the softmax on the path through one layer, forward and backward.
ROUNDED_OPERATIONS_PER_LAYER = 16
# With several processes, only lines of the first: all report the same.
_STEP = re.compile(r"(?:\[0\] )?[^\[].*completed step: (\d+),.* loss: (\S+), lm_loss")


def main(argv: list[str] | None = None) -> int:
  settings = _parse(argv)
  needed = ("maxtext", "jax", "grain", "rich", "matplotlib")
  if missing := [name for name in needed if not importlib.util.find_spec(name)]:
    print(f"Missing: {', '.join(missing)}. Install them: {installed.HOW}.", file=sys.stderr)
    return 1
  started = time.monotonic()
  settings.output.mkdir(parents=True, exist_ok=True)
  try:
    _prepare(settings)
    active = None if settings.pipeline_impl == "host" else f"pipeline_impl={settings.pipeline_impl} is active"
    pipelined = _train(settings, "pipelined", settings.pipelined_keys(), active, settings.processes)
    sequential = _train(settings, "sequential", settings.sequential_keys(), None)
  except trainer.RunFailedError as error:
    print(error, file=sys.stderr)
    return 1
  agree = _compare(settings, pipelined, sequential)
  print(f"{time.monotonic() - started:.0f} s")
  return 0 if agree else 1


def _parse(argv: list[str] | None) -> demo_settings.Settings:
  parser = argparse.ArgumentParser(prog="python -m examples.demo", description=__doc__)
  add, of_processes = parser.add_argument, "processes of the pipelined run, as on several hosts; the other run has one"
  add("--steps", type=int, default=40, help="training steps of each run (default: %(default)s)")
  add("--output", type=pathlib.Path, default="demo-output", help="folder for everything it writes (default: %(default)s)")
  add("--pipeline-impl", default="circular_bsw", help="`host` is MaxText's own pipeline (default: %(default)s)")
  add("--processes", type=int, default=1, help=f"{of_processes} (default: %(default)s)")
  add("extra_keys", nargs="*", metavar="KEY=VALUE", help="more MaxText keys for the pipelined run")
  arguments = parser.parse_args(argv)
  if arguments.steps < 1:
    parser.error(f"--steps {arguments.steps}: give at least 1")
  if arguments.processes < 1 or demo_settings.DEVICES % arguments.processes:
    parser.error(f"--processes {arguments.processes}: give a divisor of {demo_settings.DEVICES}, the number of devices")
  if wrong := [key for key in arguments.extra_keys if "=" not in key]:
    parser.error(f"not KEY=VALUE: {' '.join(wrong)}")
  given = vars(arguments) | {"output": arguments.output.resolve(), "extra_keys": tuple(arguments.extra_keys)}
  return demo_settings.Settings(**given)


def _prepare(settings: demo_settings.Settings) -> None:
  """Writes text and initial weights, in a process of its own."""
  print("Preparing text and initial weights ...", flush=True)
  own = [str(settings.output), str(settings.steps), settings.pipeline_impl, *settings.extra_keys]
  arguments = ["-m", "examples.demo.prepare", *own]
  trainer.run_python(arguments, settings.output / "prepare.log", devices=demo_settings.DEVICES)
  sizes = json.loads(settings.summary_file.read_text(encoding="utf-8"))
  print(
      f"text:       Python's language reference, {sizes['topics']} topics, {sizes['characters']} characters\n"
      f"model:      Llama-type, {demo_settings.LAYERS} layers, {sizes['parameters'] / 1e6:.1f} M parameters, float32\n"
      f"devices:    {demo_settings.DEVICES} virtual CPU devices",
      flush=True,
  )


def _train(
    settings: demo_settings.Settings, name: str, keys: list[str], expect: str | None, processes: int = 1
) -> list[float]:
  """Trains one run, also the name of its weights' layout, and returns the loss of every step.

  It shows a progress bar, or without a terminal a line every ten steps. Raises RunFailedError if the trainer fails or
  skips a step, or if no line of its log contains `expect`.
  """
  from rich import get_console, progress  # pylint: disable=import-outside-toplevel

  metrics = [settings.metrics_file(name, process) for process in range(processes)]
  for file in metrics:
    file.unlink(missing_ok=True)  # a run that dies early must not be judged by an older file
  own_keys = {
      "run_name": name,
      "metrics_file": settings.metrics_file(name, 0 if processes == 1 else "{process}"),
      "load_parameters_path": settings.weights(name) / "items",
  }
  arguments = ["-m", trainer.PRE_TRAIN, *keys, *settings.shared_keys(), *trainer.as_arguments(own_keys)]
  log = settings.output / f"{name}.log"
  where = f" ({processes} processes)" if processes > 1 else ""
  print(f"{name + ':':11} {' '.join(keys)}{where}", flush=True)
  bar = progress.Progress(
      progress.SpinnerColumn(),
      progress.TextColumn("{task.description:24}"),
      progress.BarColumn(),
      progress.MofNCompleteColumn(),
      progress.TimeElapsedColumn(),
      disable=not get_console().is_terminal,
  )
  with bar:
    task = bar.add_task("starting and compiling", total=settings.steps)

    def show(line: str) -> None:
      if match := _STEP.match(line):
        step, loss = int(match[1]), float(match[2])
        bar.update(task, completed=step + 1, description=f"loss {loss:.3f}")
        if bar.disable and (step % 10 == 0 or step == settings.steps - 1):
          print(f"  step {step:3d}  loss {loss:.3f}", flush=True)

    trainer.run_python(arguments, log, devices=demo_settings.DEVICES, processes=processes, on_line=show)
    reported = trainer.read_metrics(metrics, "learning/loss") if metrics[0].exists() else []
    if len(reported) != settings.steps:
      raise trainer.RunFailedError(f"The {name} run reported {len(reported)} of {settings.steps} steps; its log: {log}")
    if expect is not None and expect not in log.read_text(encoding="utf-8"):
      raise trainer.RunFailedError(
          f"The {name} run's log does not contain {expect!r}, so it did not run what was asked for: {log}"
      )
  return [each["learning/loss"] for each in reported]


def tolerance(loss: float, step: int) -> float:
  """Returns how far the losses of two float32 runs of one computation may be apart at `step`, counted from 0.

  Another order of summation changes a result by about one rounding error per operation in the chain, relative to its
  size: `EPSILON` times the layers times the operations in a layer. Each optimizer step starts from the differences of all
  earlier steps and adds its own, so the bound grows with the number of steps.
  """
  return EPSILON * demo_settings.LAYERS * ROUNDED_OPERATIONS_PER_LAYER * (step + 1) * abs(loss)


def compared(pipelined: Sequence[float], sequential: Sequence[float]) -> list[tuple[float, float]]:
  """Returns how far apart two curves are at each step, and the `tolerance`."""
  steps = enumerate(zip(pipelined, sequential, strict=True))
  return [(abs(ours - reference), tolerance(reference, step)) for step, (ours, reference) in steps]


def excess_steps(pipelined: Sequence[float], sequential: Sequence[float]) -> list[int]:
  """Returns the steps at which the curves are further apart than `tolerance`, or one of them is not finite."""
  steps = enumerate(compared(pipelined, sequential))
  # Negated, so that a NaN counts as too far apart.
  return [step for step, (difference, allowed) in steps if not difference <= allowed < math.inf]


def write_picture(path: pathlib.Path, pipelined: Sequence[float], sequential: Sequence[float], title: str) -> None:
  """Writes a PNG: both curves, and below them, on a logarithmic scale, their difference and the allowed `tolerance`."""
  from matplotlib.figure import Figure  # pylint: disable=import-outside-toplevel

  figure = Figure(figsize=(8, 6), layout="constrained")
  curves, gap = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
  curves.plot(sequential, color="tab:orange", linewidth=4, alpha=0.5, label="without a pipeline")
  curves.plot(pipelined, color="tab:blue", linewidth=1.5, label="pipeline")
  curves.set(ylabel="loss", title=title)
  curves.legend()
  differences, allowed = zip(*compared(pipelined, sequential), strict=True)
  gap.plot(differences, color="tab:red", label="difference")
  gap.plot(allowed, color="tab:gray", linestyle="--", label="allowed")
  gap.set(xlabel="step", ylabel="loss")
  gap.set_yscale("symlog", linthresh=EPSILON)  # logarithmic but with a zero, since most steps have the same loss
  gap.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False)  # above: lines end at the right
  figure.savefig(path, dpi=120)


def _compare(settings: demo_settings.Settings, pipelined: list[float], sequential: list[float]) -> bool:
  """Prints both curves, writes their picture, and returns whether they agree."""
  found = compared(pipelined, sequential)
  print("\nstep   pipelined  sequential  difference   allowed")
  for step in sorted({*range(0, settings.steps, max(1, settings.steps // 10)), settings.steps - 1}):
    difference, allowed = found[step]
    print(f"{step:4d} {pipelined[step]:11.6f} {sequential[step]:11.6f} {difference:11.1e} {allowed:9.1e}")
  largest = max(range(settings.steps), key=lambda step: found[step][0])
  print(f"Largest difference: {found[largest][0]:.1e}, at step {largest}.")

  picture = settings.output / "loss.png"
  title = f"pipeline_impl={settings.pipeline_impl}, {demo_settings.STAGES} stages × {demo_settings.FSDP} FSDP"
  write_picture(picture, pipelined, sequential, title)
  print(f"Both curves: {picture}")
  if excess := excess_steps(pipelined, sequential):
    print(f"They differ by more than float32 explains: at {len(excess)} steps, first at step {excess[0]}.")
  else:
    print("They agree within float32.")
  return not excess


if __name__ == "__main__":
  sys.exit(interruption.run(main, "demo"))

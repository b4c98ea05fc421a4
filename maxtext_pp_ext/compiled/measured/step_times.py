# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Paired times of train steps on virtual CPU devices: all steps take turns in one process.

The command calls `step_times(...)`. The process that runs the steps runs this module as a program:

  python -m maxtext_pp_ext.compiled.measured.step_times RESULT.json PLAN.json

Transfers between virtual devices are copies in memory, and all devices share the machine's cores. So the times show
whether a step computes or copies more than another, not how fast it would be on TPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import json
import math
import pathlib
import statistics
import sys
from typing import Any

from maxtext_pp_ext.compiled import child, limits
from maxtext_pp_ext.compiled.measured import paired
from maxtext_pp_ext.processes import interruption

_PLAN, _DOING = "plan.json", "doing.txt"


def step_times(
    arguments: Mapping[str, Sequence[str]],
    *,
    rounds: int,
    bounds: limits.Limits,
    cpu_devices: int,
    on_tick: Callable[[str, int], None] = lambda doing, memory: None,
) -> dict[str, Any]:
  """Compiles and runs several train steps in one separate process.

  Args:
    arguments: MaxText's command-line arguments of each step, by the step's name.
    rounds: how often each step is measured.
    bounds: limits of wall time and host memory of the process, which holds the states of all steps at once.
    cpu_devices: number of virtual devices.
    on_tick: called regularly with the current activity and the resident bytes now.

  Returns:
    `steps` and `base`, the name of the first step that ran; or `failure` if the process failed. `steps` has for each
    name the `seconds` of each round, their `median_s`, and the `ratio` of times to those of `base` within a round; or
    `failure`.
  """
  with interruption.temporary_folder() as folder:
    plan, doing = pathlib.Path(folder) / _PLAN, pathlib.Path(folder) / _DOING
    plan.write_text(json.dumps({"rounds": rounds, "arguments": dict(arguments)}), encoding="utf-8")
    found = child.run(
        __name__,
        [str(plan)],
        bounds=bounds,
        cpu_devices=cpu_devices,
        on_tick=lambda _, memory: on_tick(doing.read_text(encoding="utf-8") if doing.exists() else "starting", memory),
    )
  if "failure" in found:
    return found
  return found | compared(found["steps"]) | {"rounds": rounds}


def compared(steps: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
  """`base`, and `steps` with medians and ratios added; steps with `failure` stay unchanged."""
  base = next((name for name, each in steps.items() if "failure" not in each), None)

  def figures(each: Mapping[str, Any]) -> dict[str, Any]:
    if "failure" in each:
      return dict(each)
    ratio = paired.ratio(each["seconds"], steps[base]["seconds"])  # type: ignore[index]  # this one at least has run
    return {**each, "median_s": statistics.median(each["seconds"]), "ratio": dataclasses.asdict(ratio)}

  return {"base": base, "steps": {name: figures(each) for name, each in steps.items()}}


def main(argv: list[str]) -> None:
  """The process in which the steps run."""
  result, plan_file = map(pathlib.Path, argv)
  plan = json.loads(plan_file.read_text(encoding="utf-8"))
  doing = plan_file.with_name(_DOING)

  def say(text: str) -> None:
    doing.write_text(text, encoding="utf-8")

  # Before MaxText is imported: our keys have to be in its schema.
  import maxtext_pp_ext

  maxtext_pp_ext.install()
  from maxtext_pp_ext.host.models import train_step

  steps, found = {}, {}
  for name, arguments in plan["arguments"].items():
    say(f"compiling {name}")
    try:
      steps[name] = train_step.RunningStep(arguments)
    except train_step.RefusedError as error:
      found[name] = {"failure": str(error), "refused": True}
    except Exception as error:  # pylint: disable=broad-exception-caught
      # Any error concerns this step only; the others are still worth measuring.
      found[name] = {"failure": f"{type(error).__name__}: {error}".splitlines()[0]}
  if steps:
    say("first steps, not measured")
    rounds = plan["rounds"]
    seconds = paired.measure(steps, rounds, lambda done: say(f"round {min(done + 1, rounds)} of {rounds}"))
    found |= {name: checked(seconds[name], step.losses) for name, step in steps.items()}
  in_order = {name: found[name] for name in plan["arguments"]}
  result.write_text(json.dumps({"steps": in_order}), encoding="utf-8")


def checked(seconds: list[float], losses: list[float]) -> dict[str, Any]:
  """The seconds and losses of a step, or `failure` if a loss is not finite: such times mean nothing."""
  for number, loss in enumerate(losses):
    if not math.isfinite(loss):
      return {"failure": f"the loss of step {number} is {loss}"}
  return {"seconds": seconds, "losses": losses}


if __name__ == "__main__":
  main(sys.argv[1:])

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""One turn of one train step: a process that builds its state, warms it up, measures, and gives all memory back.

python -m maxtext_pp_ext.compiled.measured.turn RESULT.json ROUNDS CONFIG.yml key=value …
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import json
import math
import pathlib
import sys
import time
from typing import Any

_WARM_UP = 2  # steps


def main(argv: list[str]) -> None:
  """Writes `seconds` of each round, `losses` of all steps, and `memory`; or `failure`."""
  result, rounds, *arguments = argv
  # Before MaxText is imported: our keys have to be in its schema.
  import maxtext_pp_ext

  maxtext_pp_ext.install()
  from maxtext_pp_ext.host.models import train_step

  found: dict[str, Any]
  try:
    step = train_step.RunningStep(arguments)
  except train_step.RefusedError as error:
    found = {"failure": str(error), "refused": True}
  else:
    import jax

    before = in_use(jax.local_devices())
    (seconds,) = measure({"": step}, int(rounds)).values()
    peak = in_use(jax.local_devices())
    memory = None if before is None or peak is None else {"peak": peak, "peak_before_steps": before}
    found = checked(seconds, step.losses) | {"memory": memory}
  pathlib.Path(result).write_text(json.dumps(found), encoding="utf-8")


def measure(
    steps: Mapping[str, Callable[[], Any]], rounds: int, on_round: Callable[[int], None] = lambda done: None
) -> dict[str, list[float]]:
  """Measures the seconds of each step, which runs and waits until it is done, in each round.

  In a round each step runs once. The order rotates, so each step takes each place in turn. Before the first round, each
  step runs twice unmeasured, since first runs allocate memory. `on_round` is called with the number of finished rounds:
  0 before the first.
  """
  for step in steps.values():
    for _ in range(_WARM_UP):
      step()
  on_round(0)
  names = list(steps)
  seconds: dict[str, list[float]] = {name: [] for name in steps}
  for number in range(rounds):
    turn = number % len(names)
    for name in names[turn:] + names[:turn]:
      start = time.perf_counter()
      steps[name]()
      seconds[name].append(time.perf_counter() - start)
    on_round(number + 1)
  return seconds


def in_use(devices: Sequence[Any]) -> int | None:
  """The most bytes that one of the devices had in use so far; None if a device does not report it, as CPUs do not."""
  found = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in devices]
  known = [size for size in found if size is not None]
  return max(known) if known and len(known) == len(found) else None


def checked(seconds: list[float], losses: list[float]) -> dict[str, Any]:
  """The seconds and losses of a step, or `failure` if a loss is not finite: such times mean nothing."""
  for number, loss in enumerate(losses):
    if not math.isfinite(loss):
      return {"failure": f"the loss of step {number} is {loss}"}
  return {"seconds": seconds, "losses": losses}


if __name__ == "__main__":
  main(sys.argv[1:])

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The programs that run in processes of their own, which give all memory and devices back when they end.

  python -m maxtext_pp_ext.compiled.tasks TASK RESULT.json ARGUMENT …

The tasks are those of `TASKS`. Their result is a JSON object.
"""

import collections
from collections.abc import Callable, Mapping, Sequence
import json
import math
import pathlib
import re
import sys
import time
from typing import Any

# Masks of attention may have millions of elements. No choice of a branch needs a table of this many characters.
_LARGE_TABLE = re.compile(r"constant\(\{[^()]{400000,}\}\)")
_WARM_UP = 2  # steps


def _train_step() -> Any:
  """The module that has MaxText's train step. Before MaxText is imported, our keys have to be in its schema."""
  import maxtext_pp_ext

  maxtext_pp_ext.install()
  from maxtext_pp_ext.host.models import train_step

  return train_step


def compile_step(hlo_file: str, is_here: str, *arguments: str) -> dict[str, Any]:
  """See `child.compile_step`; `is_here` is "here" for the devices of this process."""
  train_step = _train_step()
  try:
    compiled = train_step.compile_train_step(arguments, here=is_here == "here")
  except train_step.RefusedError as error:
    return {"failure": str(error), "refused": True}
  platform = compiled.mesh.devices.flat[0].platform
  pathlib.Path(hlo_file).write_text(printed(compiled.program), encoding="utf-8")
  figures = _memory(compiled.program, platform) | compiled.times
  figures["names"] = {"batch": train_step.BATCH, "optimizer": train_step.OPTIMIZER}
  if platform == "tpu":
    figures |= {"placement": train_step.placement(compiled), "work": train_step.work(compiled.config)}
  return figures


def printed(executable: Any) -> str:
  """The optimised HLO, with the tables of integers that `as_text` leaves out; projections follow what they decide."""
  from maxtext_pp_ext.jax_private import HloPrintOptions

  options = HloPrintOptions()
  options.print_large_constants = True
  (module,) = executable.runtime_executable().hlo_modules()
  return _LARGE_TABLE.sub("constant({...})", module.to_string(options))


def _memory(compiled: Any, platform: str) -> dict[str, Any]:
  memory = compiled.memory_analysis()
  # The CPU compiler's peak leaves temporary buffers out. A TPU's counts those in the host's memory, too (jaxlib 0.11.2).
  is_device_memory = platform != "cpu" and not memory.host_temp_size_in_bytes
  peak = getattr(memory, "peak_memory_in_bytes", 0) if is_device_memory else 0
  return {
      "bytes": {"temp": memory.temp_size_in_bytes, "peak": peak or None, "arguments": memory.argument_size_in_bytes},
      "temp_GB": round(memory.temp_size_in_bytes / 1e9, 2),
      "peak_GB": round(peak / 1e9, 2) if peak else None,
      "arg_GB": round(memory.argument_size_in_bytes / 1e9, 2),
  }


def turn(rounds: str, *arguments: str) -> dict[str, Any]:
  """One turn of one train step: `seconds` of each round, `losses` of all steps, and `memory`; or `failure`."""
  train_step = _train_step()
  try:
    step = train_step.RunningStep(arguments)
  except train_step.RefusedError as error:
    return {"failure": str(error), "refused": True}
  import jax

  before = in_use(jax.local_devices())
  (seconds,) = measure({"": step}, int(rounds)).values()
  peak = in_use(jax.local_devices())
  memory = None if before is None or peak is None else {"peak": peak, "peak_before_steps": before}
  return checked(seconds, step.losses) | {"memory": memory}


def measure(
    steps: Mapping[str, Callable[[], Any]], rounds: int, on_round: Callable[[int], None] = lambda done: None
) -> dict[str, list[float]]:
  """Measures the seconds of each step, which runs and waits until it is done, in each round.

  The order rotates, so each step takes each place in turn. Before the first round, each step runs twice unmeasured, since
  first runs allocate memory. `on_round` is called with the number of finished rounds: 0 before the first.
  """
  for step in steps.values():
    for _ in range(_WARM_UP):
      step()
  on_round(0)
  names = collections.deque(steps)
  seconds: dict[str, list[float]] = {name: [] for name in steps}
  for number in range(rounds):
    for name in names:
      start = time.perf_counter()
      steps[name]()
      seconds[name].append(time.perf_counter() - start)
    names.rotate(-1)
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


def devices() -> dict[str, Any]:
  """JAX's default devices: `platform`, number by kind (`kinds`), `count`, number of their `processes`, and `runtime`."""
  import jax

  found = jax.devices()
  return {
      "platform": found[0].platform,
      "kinds": collections.Counter(device.device_kind for device in found),
      "count": len(found),
      "processes": jax.process_count(),
      "runtime": found[0].client.platform_version,
  }


TASKS: Mapping[str, Callable[..., dict[str, Any]]] = {each.__name__: each for each in (compile_step, turn, devices)}


if __name__ == "__main__":
  task, result, *rest = sys.argv[1:]
  pathlib.Path(result).write_text(json.dumps(TASKS[task](*rest)), encoding="utf-8")

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Times and memory of several train steps that take turns on the same devices.

Accelerators have no memory for several states at once, and count their peak from the start of a process. So each turn is
a process of its own. Steps A, B, C take turns as A B C C B A, where C's two are one: what changes steadily meanwhile
affects all alike. Each step is compiled in its first turn only.
"""

from collections.abc import Callable, Mapping, Sequence
import statistics
from typing import Any

from maxtext_pp_ext.compiled import child, limits
from maxtext_pp_ext.processes import interruption

# MaxText's key, and the variable with which it is set; MaxText refuses both together.
_CACHE, _CACHE_VARIABLE = "jax_cache_dir", "M_JAX_CACHE_DIR"
_WITH_CACHE = {
    "JAX_ENABLE_COMPILATION_CACHE": "true",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
}


def step_times(
    arguments: Mapping[str, Sequence[str]],
    *,
    rounds: int,
    bounds: limits.Limits,
    devices: int | child.Machine,
    on_tick: Callable[[str, int], None] = lambda doing, memory: None,
) -> dict[str, Any]:
  """Compiles and runs several train steps, whose MaxText arguments are given by name.

  `bounds` are those of each turn. `on_tick` is called regularly with the current activity and the resident bytes now.

  Returns `steps`; `base`, the name of the first that ran; `rounds`; and `turns`, name and rounds of each, in order.
  `steps` has for each name `failure`, or: the `seconds` of each round and the `losses` of all steps, turn after turn;
  `step_s`, quartiles of the seconds; `ratio`, quartiles of their ratios to those of `base`, round by round; and `memory`,
  bytes of the device with the most: `peak` in use, and `peak_before_steps`, which initialising the state took; None if
  the devices do not report it.
  """
  found: dict[str, dict[str, Any]] = {}
  order = turns(list(arguments), rounds)
  with interruption.temporary_folder() as cache:
    for number, (name, count) in enumerate(order):
      if "failure" in found.get(name, {}):
        continue
      doing = f"{name}, turn {number + 1} of {len(order)}"
      kept = [argument for argument in arguments[name] if not argument.startswith(f"{_CACHE}=")]
      ran = child.run(
          "turn",
          [str(count), *kept],
          bounds=bounds,
          devices=devices,
          environment=_WITH_CACHE | {_CACHE_VARIABLE: cache},
          on_tick=lambda _, memory, doing=doing: on_tick(doing, memory),  # type: ignore[misc]
      )
      found[name] = joined(found[name], ran) if name in found else ran
  return compared(found) | {"rounds": rounds, "turns": order}


def turns(names: Sequence[str], rounds: int) -> list[tuple[str, int]]:
  """Returns the name and the rounds of each turn: forth and back, with both turns of the last as one."""
  second = rounds // 2
  *others, last = names
  forth = [(name, rounds - second) for name in others]
  return [*forth, (last, rounds), *((name, second) for name in reversed(others) if second)]


def joined(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
  """The figures of both turns of a step, or `failure` if one failed."""
  for each in (first, second):
    if "failure" in each:
      return dict(each)
  memory = None
  if first["memory"] and second["memory"]:
    memory = {key: max(value, second["memory"][key]) for key, value in first["memory"].items()}
  return {
      "seconds": [*first["seconds"], *second["seconds"]],
      "losses": [*first["losses"], *second["losses"]],
      "memory": memory,
      "host_memory_GiB": max(first["host_memory_GiB"], second["host_memory_GiB"]),
  }


def compared(steps: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
  """`base`, and `steps` with quartiles and ratios added; steps with `failure` stay unchanged."""
  base = next((name for name, each in steps.items() if "failure" not in each), None)

  def figures(each: Mapping[str, Any]) -> dict[str, Any]:
    if "failure" in each:
      return dict(each)
    of_base = steps[base]["seconds"]  # type: ignore[index]  # this one at least has run
    return {**each, "step_s": quartiles(each["seconds"]), "ratio": ratio(each["seconds"], of_base)}

  return {"base": base, "steps": {name: figures(each) for name, each in steps.items()}}


def ratio(seconds: Sequence[float], base: Sequence[float]) -> dict[str, float]:
  """The time of one step as a multiple of another's, from times measured in the same rounds, as `quartiles`."""
  return quartiles([mine / other for mine, other in zip(seconds, base, strict=True)])


def quartiles(values: Sequence[float]) -> dict[str, float]:
  """The quartiles of at least one value, between neighbours where there is none at that place."""
  lower, median, upper = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [*values] * 3
  return {"median": median, "lower_quartile": lower, "upper_quartile": upper}

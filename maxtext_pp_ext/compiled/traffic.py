# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Traffic and FLOPs per device of one step of a compiled program, from its optimised HLO.

Every instruction counts as often as it runs (`program/execution.py`), on average over the devices.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

from maxtext_pp_ext.compiled.program import collectives, execution, products


@dataclasses.dataclass
class Traffic:
  """Sums over a step, per device."""

  # Bytes sent, by kind of collective.
  wire_bytes: collections.Counter = dataclasses.field(default_factory=collections.Counter)
  balanced_ragged_bytes: float = 0.0  # of ragged all-to-alls the bytes sent if all devices get equally many rows
  count: collections.Counter = dataclasses.field(default_factory=collections.Counter)  # executions, by kind of collective
  weight_gathers: float = 0  # all-gathers executed, counted per floating-point array of at least WEIGHT_BYTES
  # FLOPs of matrix multiplications and convolutions, two per multiply-add. Pallas kernels are left out.
  dot_flops: float = 0.0

  @property
  def total_wire_bytes(self) -> float:
    return sum(self.wire_bytes.values())

  def add(self, other: Traffic, times: float = 1) -> None:
    for kind, value in other.wire_bytes.items():
      self.wire_bytes[kind] += times * value  # type: ignore[assignment]  # may be a fraction
    for kind, value in other.count.items():
      self.count[kind] += times * value  # type: ignore[assignment]
    self.balanced_ragged_bytes += times * other.balanced_ragged_bytes
    self.weight_gathers += times * other.weight_gathers
    self.dot_flops += times * other.dot_flops

  def to_json(self) -> dict[str, Any]:
    return {
        "wire_GB": {kind: round(value / 1e9, 3) for kind, value in sorted(self.wire_bytes.items())},
        "wire_total_GB": round(self.total_wire_bytes / 1e9, 3),
        "balanced_ragged_GB": round(self.balanced_ragged_bytes / 1e9, 3),
        "count": {kind: count_of(value) for kind, value in sorted(self.count.items())},
        "weight_gathers": count_of(self.weight_gathers),
        "dot_flops": self.dot_flops,
    }


def count_of(executions: float) -> float:
  """A number of executions as it is shown. It is no integer where only some devices execute something."""
  return round(executions) if float(executions).is_integer() else round(executions, 3)


def analyse(run: execution.Execution) -> Traffic:
  """Traffic and dot FLOPs of one run of a program."""
  return run.total(_of_instructions, Traffic.add)


def _of_instructions(run: execution.Execution) -> Traffic:
  result = Traffic()
  for step in run.computation.instructions:
    if found := collectives.collective_at(run.module, run.computation, step):
      _, collective = found
      result.wire_bytes[collective.kind] += collective.wire_bytes  # type: ignore[assignment]  # may be a fraction
      result.balanced_ragged_bytes += collective.balanced_bytes if collective.kind == collectives.RAGGED else 0.0
      result.count[collective.kind] += 1
      result.weight_gathers += collective.weights if collective.kind == "all-gather" else 0
    result.dot_flops += products.dot_flops(run.computation, step)
  return result

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Traffic and FLOPs per device of one step of a compiled program, on average over the devices."""

import collections
from collections.abc import Iterable, Mapping
import dataclasses
from typing import Any

from maxtext_pp_ext.compiled import spans
from maxtext_pp_ext.compiled.program import collectives, execution, products


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traffic:
  """Sums over a step, per device."""

  wire_bytes: Mapping[str, float]  # sent, by kind of collective
  balanced_ragged_bytes: float  # of ragged all-to-alls what is sent if all devices get equally many rows
  count: Mapping[str, float]  # executions, by kind of collective
  weight_gathers: float  # all-gathers executed, counted per floating-point array of at least WEIGHT_BYTES
  # FLOPs of matrix multiplications and convolutions, two per multiply-add. Pallas kernels are left out.
  dot_flops: float

  @property
  def total_wire_bytes(self) -> float:
    return sum(self.wire_bytes.values())

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


def analyse(run: execution.Execution, found: Iterable[spans.Span]) -> Traffic:
  """Traffic and dot FLOPs of one run of a program with these collectives."""
  wire_bytes: dict[str, float] = collections.defaultdict(float)
  count: dict[str, float] = collections.defaultdict(float)
  ragged = gathers = 0.0
  for span in found:
    kind = span.collective.kind
    wire_bytes[kind] += span.wire_bytes
    count[kind] += span.executions
    ragged += span.collective.balanced_bytes * span.executions if kind == collectives.RAGGED else 0.0
    gathers += span.collective.weights * span.executions if kind == "all-gather" else 0.0
  return Traffic(
      wire_bytes=wire_bytes,
      balanced_ragged_bytes=ragged,
      count=count,
      weight_gathers=gathers,
      dot_flops=run.total(products.dot_flops),
  )

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Traffic and FLOPs per device of one step of a compiled program, from its optimised HLO.

Every instruction counts as often as the loops around it run. Bytes on the wire are the bytes that a device in a group of
g has to send, whatever the algorithm. For an array of b bytes they are (g−1)/g·b for an all-gather or all-to-all,
(g−1)/g of the summed array for a reduce-scatter, twice that for an all-reduce, and b for a permute. A ragged all-to-all
counts twice: the buffer that receives, which has room for all tokens where one device may get them all, and what a device
sends if all get equally many.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from typing import Any

import numpy as np

from maxtext_pp_ext.compiled import hlo

BETWEEN_SLICES = "between slices"
RAGGED = "ragged-all-to-all"
COLLECTIVES = (
    "all-gather",
    "reduce-scatter",
    "all-reduce",
    "all-to-all",
    RAGGED,
    "collective-permute",
)
# A collective on another execution thread keeps its opcode, inside the computation that call-start names.
_STARTS = {f"{kind}-start": kind for kind in COLLECTIVES}
# The TPU compiler's fused reduce-scatter: an all-reduce in a computation of this name, followed by a slice.
_FUSED_REDUCE_SCATTER = "all-reduce-scatter"
# Gathers of scales, norms or routing indices are smaller than this; the weight matrices that matter are larger.
WEIGHT_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
  """One execution of a collective of the program.

  Attributes:
    kind: one of COLLECTIVES, or BETWEEN_SLICES for a transfer over the data-centre network.
    wire_bytes: bytes that a device sends; of a ragged all-to-all the bytes of the buffer that receives.
    balanced_bytes: bytes that a device sends if all get equally many rows of a ragged all-to-all; else as wire_bytes.
    weights: number of its result arrays that are floating-point and have at least WEIGHT_BYTES.
  """

  kind: str
  wire_bytes: float
  balanced_bytes: float
  weights: int


@dataclasses.dataclass
class Traffic:
  """Sums over a step, per device.

  Attributes:
    wire_bytes: bytes sent, by kind of collective.
    balanced_ragged_bytes: of ragged all-to-alls the bytes sent if all devices get equally many rows.
    count: executions, by kind of collective.
    weight_gathers: all-gathers executed, counted per floating-point array of at least WEIGHT_BYTES.
    dot_flops: FLOPs of matrix multiplications and convolutions, two per multiply-add. Pallas kernels are left out.
    loops_without_trip_count: loops whose number of iterations could not be read; each counts as one iteration.
  """

  wire_bytes: collections.Counter = dataclasses.field(default_factory=collections.Counter)
  balanced_ragged_bytes: float = 0.0
  count: collections.Counter = dataclasses.field(default_factory=collections.Counter)
  weight_gathers: int = 0
  dot_flops: float = 0.0
  loops_without_trip_count: list[str] = dataclasses.field(default_factory=list)

  @property
  def total_wire_bytes(self) -> float:
    return sum(self.wire_bytes.values())

  def add(self, other: Traffic, times: int = 1) -> None:
    for kind, value in other.wire_bytes.items():
      self.wire_bytes[kind] += times * value
    for kind, value in other.count.items():
      self.count[kind] += times * value
    self.balanced_ragged_bytes += times * other.balanced_ragged_bytes
    self.weight_gathers += times * other.weight_gathers
    self.dot_flops += times * other.dot_flops
    self.loops_without_trip_count += other.loops_without_trip_count

  def to_json(self) -> dict[str, Any]:
    return {
        "wire_GB": {kind: round(value / 1e9, 3) for kind, value in sorted(self.wire_bytes.items())},
        "wire_total_GB": round(self.total_wire_bytes / 1e9, 3),
        "balanced_ragged_GB": round(self.balanced_ragged_bytes / 1e9, 3),
        "count": dict(sorted(self.count.items())),
        "weight_gathers": self.weight_gathers,
        "dot_flops": self.dot_flops,
        "loops_without_trip_count": self.loops_without_trip_count,
    }


def of_program(text: str) -> Traffic:
  """Traffic and dot FLOPs of an HLO program.

  Raises:
    HloError: the text is not a whole program, or the reader does not understand a part of it.
  """
  module = hlo.program(text)
  with hlo.reading():
    return analyse(module)


def analyse(module: hlo.Module) -> Traffic:
  """Traffic and dot FLOPs of one run of the module."""
  known: dict[str, Traffic] = {}

  def of_computation(computation: hlo.Computation) -> Traffic:
    if computation.name not in known:
      total = Traffic()
      for instruction in computation.instructions:
        total.add(_of_instruction(module, computation, instruction))
        times = module.trip_count(instruction) if instruction.opcode == "while" else 1
        if times is None:
          total.loops_without_trip_count.append(instruction.name)
          times = 1
        called = [of_computation(callee) for callee in module.callees(instruction)]
        for each in [_most(called)] if instruction.opcode == "conditional" and called else called:
          total.add(each, times)
      known[computation.name] = total
    return known[computation.name]

  return of_computation(module.computations[module.entry])


def _most(branches: list[Traffic]) -> Traffic:
  """The most that one run of a conditional can send and compute: it runs one of the branches."""
  sends = max(branches, key=lambda branch: branch.total_wire_bytes)
  return dataclasses.replace(
      sends,
      dot_flops=max(branch.dot_flops for branch in branches),
      loops_without_trip_count=[name for branch in branches for name in branch.loops_without_trip_count],
  )


def _of_instruction(module: hlo.Module, computation: hlo.Computation, instruction: hlo.Instruction) -> Traffic:
  result = Traffic()
  if collective := collective_of(module, computation, instruction):
    result.wire_bytes[collective.kind] = collective.wire_bytes  # type: ignore[assignment]  # may be a fraction
    result.balanced_ragged_bytes = collective.balanced_bytes if collective.kind == RAGGED else 0.0
    result.count[collective.kind] = 1
    result.weight_gathers = collective.weights if collective.kind == "all-gather" else 0
  result.dot_flops = dot_flops(computation, instruction)
  return result


def collective_of(module: hlo.Module, computation: hlo.Computation, instruction: hlo.Instruction) -> Collective | None:
  """The instruction as a collective; None for other instructions, and for a `-done`, since its `-start` counts."""
  if instruction.opcode == "send":
    sent = _sent_between_slices(instruction)
    return Collective(kind=BETWEEN_SLICES, wire_bytes=sent, balanced_bytes=sent, weights=0)
  kind = _STARTS.get(instruction.opcode, instruction.opcode)
  if kind not in COLLECTIVES:
    return None
  arrays = instruction.arrays
  if instruction.opcode != kind and kind != "all-reduce":
    # The result of a start has operands, results and context side by side. An all-reduce-start has only its results.
    count = len(instruction.operand_names)
    arrays = arrays[count : 2 * count] if len(arrays) >= 2 * count else (max(arrays, key=lambda array: array.bytes),)
  size = sum(array.bytes for array in arrays)
  group = group_size(module, instruction)
  share = (group - 1) / group
  if kind == "all-reduce" and computation.name.startswith(_FUSED_REDUCE_SCATTER):
    kind, wire = "reduce-scatter", size * share
  elif kind == "all-reduce":
    wire = 2 * size * share
  elif kind == "reduce-scatter":
    wire = size * (group - 1)  # the result is a shard
  elif kind in ("all-gather", "all-to-all"):
    wire = size * share
  else:
    wire = size
  weights = sum(array.is_floating and array.bytes >= WEIGHT_BYTES for array in arrays)
  balanced: float = wire
  if kind == RAGGED:  # the buffer that receives is an operand, too
    _, balanced_count = balanced_rows(computation, instruction)
    buffer = operand_arrays(computation, instruction)[1]
    wire, balanced = buffer.bytes, buffer.bytes / max(buffer.dims[0], 1) * balanced_count * share
  return Collective(kind=kind, wire_bytes=wire, balanced_bytes=balanced, weights=weights)


def balanced_rows(computation: hlo.Computation, ragged: hlo.Instruction) -> tuple[int, int]:
  """(rows of a ragged all-to-all's larger buffer, of its smaller one: those that are full if routing is balanced)."""
  buffers = operand_arrays(computation, ragged)[:2]
  if len(buffers) < 2 or not all(buffer.dims for buffer in buffers):
    raise hlo.HloError(f"{ragged.name} is a ragged all-to-all without two buffers.")
  given, taken = (buffer.dims[0] for buffer in buffers)
  return max(given, taken), min(given, taken)


def operand_arrays(computation: hlo.Computation, step: hlo.Instruction) -> list[hlo.Array]:
  """The arrays of an instruction's operands, of tuples all of them."""
  sources = (computation.by_name.get(name) for name in step.operand_names)
  return [array for source in sources if source for array in source.arrays]


def _sent_between_slices(instruction: hlo.Instruction) -> float:
  """Bytes of a `send` to the runtime that connects slices; it may be one slice's part of a collective over slices."""
  size = max((array.bytes for array in instruction.arrays), default=0)
  kind = instruction.attribute(r'_xla_megascale_transfer_type="(\w+)"')
  target = instruction.attribute(r'_xla_megascale_target="\{+([0-9,:]+)\}')
  if kind is None or target is None:
    return size  # from one device to another
  ends = [[int(end) for end in part.split(":")] for part in target[1].split(",") if part]
  slices = sum(last[-1] - last[0] + 1 for last in ends)
  share = (slices - 1) / slices
  if kind[1] == "ALL_GATHER":
    return size * (slices - 1)  # the operand is a shard
  return 2 * size * share if kind[1] == "ALL_REDUCE" else size * share


def group_size(module: hlo.Module, instruction: hlo.Instruction) -> int:
  """The number of devices in one group of a collective."""
  return len(first_group(module, instruction))


def first_group(module: hlo.Module, instruction: hlo.Instruction) -> tuple[int, ...]:
  """The partitions of a collective's first group, from any of HLO's notations; all partitions if it names no group."""
  if match := instruction.attribute(
      r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((?:\[([0-9,]*)\]T\()?([0-9,]*)\)\)?)?\s*\{([^}]*)\}"
  ):
    sizes = {axis: int(size) for axis, size in re.findall(r"'([^']+)'=(\d+)", match[1])}
    chosen = re.findall(r"'([^']+)'", match[4])
    if unknown := [axis for axis in chosen if axis not in sizes]:
      raise hlo.HloError(f"{instruction.name} has a group along {unknown[0]}, which is no axis of its mesh.")
    numbers = np.arange(math.prod(sizes.values()))
    if match[2]:  # dimensions and their order
      numbers = numbers.reshape(_integers(match[2])).transpose(_integers(match[3]))
    elif match[3]:
      numbers = np.array(_integers(match[3]))
    numbers = numbers.reshape(tuple(sizes.values()))
    return tuple(numbers[tuple(slice(None) if axis in chosen else 0 for axis in sizes)].ravel().tolist())
  if match := instruction.attribute(r"replica_groups=\[(\d+),(\d+)\]<=\[([0-9,]*)\](?:T\(([0-9,]*)\))?"):
    dims = _integers(match[3])
    numbers = np.arange(math.prod(dims)).reshape(dims)
    if match[4]:
      numbers = numbers.transpose(_integers(match[4]))
    return tuple(numbers.reshape(int(match[1]), int(match[2]))[0].tolist())
  if match := instruction.attribute(r"replica_groups=\{\{([0-9,]*)\}"):
    return tuple(_integers(match[1]))
  if (match := instruction.attribute(r"replica_groups=(\S+)")) and match[1].strip(",") != "{}":
    raise hlo.HloError(f"{instruction.name} has replica_groups={match[1][:60]}, a notation that is not known.")
  return tuple(range(module.partitions))


def _integers(text: str) -> list[int]:
  return [int(each) for each in text.split(",")]


def dot_flops(computation: hlo.Computation, instruction: hlo.Instruction, *, padding: bool = True) -> float:
  """FLOPs of a dot or convolution, two per multiply-add; 0 for anything else.

  The TPU compiler writes dots as convolutions, some with a window that lies mostly on padding.

  Args:
    computation: the computation that has the instruction.
    instruction: any instruction.
    padding: whether multiplications with padding count. Without them, the result is the FLOPs that the program needs.
  """
  if instruction.opcode == "dot":
    dims = instruction.attribute(r"lhs_contracting_dims=\{([^}]*)\}")
    lhs = _operand(computation, instruction, 0)
    contracted = math.prod(lhs.dims[int(i)] for i in dims[1].split(",") if i) if dims and lhs else 1
    return 2.0 * instruction.arrays[0].elements * contracted
  if instruction.opcode != "convolution":
    return 0.0
  labels = instruction.attribute(r"dim_labels=(\w+)_(\w+)->(\w+)")
  operand, kernel = _operand(computation, instruction, 0), _operand(computation, instruction, 1)
  result = instruction.arrays[0]
  if not (labels and operand and kernel):
    return 2.0 * result.elements
  # Every dimension of the kernel except its output features is summed over.
  flops = 2.0 * result.elements * math.prod(d for label, d in zip(labels[2], kernel.dims, strict=True) if label != "o")
  return flops if padding else flops * _share_inside(instruction, labels, operand, kernel, result)


def _share_inside(
    instruction: hlo.Instruction, labels: re.Match[str], operand: hlo.Array, kernel: hlo.Array, result: hlo.Array
) -> float:
  """Share of a convolution's multiplications whose operand is neither padding nor a hole of a dilation."""
  window = instruction.attribute(r"window=\{([^}]*)\}")
  fields = dict(field.split("=") for field in window[1].split()) if window else {}
  spatial = sorted(label for label in labels[2] if label.isdigit())

  def values(name: str, default: str) -> list[list[int]]:
    texts = fields[name].split("x") if name in fields else [default] * len(spatial)
    return [[int(value) for value in text.split("_")] for text in texts]

  strides, pads = values("stride", "1"), values("pad", "0_0")
  holes, spread = values("lhs_dilate", "1"), values("rhs_dilate", "1")
  share = 1.0
  for i, label in enumerate(spatial):
    size = operand.dims[labels[1].index(label)]
    taps, positions = kernel.dims[labels[2].index(label)], result.dims[labels[3].index(label)]
    inside = 0
    for position in range(positions):
      for tap in range(taps):
        at = position * strides[i][0] + tap * spread[i][0] - pads[i][0]
        inside += at % holes[i][0] == 0 and 0 <= at < size * holes[i][0]
    share *= inside / (positions * taps)
  return share


def _operand(computation: hlo.Computation, instruction: hlo.Instruction, index: int) -> hlo.Array | None:
  """The type of an operand, from the operand's text or from the instruction of its name."""
  if len(written := hlo.arrays_in(instruction.operands)) > index:
    return written[index]
  names = instruction.operand_names
  source = computation.by_name.get(names[index]) if len(names) > index else None
  return source.arrays[0] if source and source.arrays else None

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The collectives of a program: which instructions are one, what a device sends for it, and to whom.

Bytes on the wire are the bytes that a device in a group of g has to send, whatever the algorithm. For an array of b bytes
they are (g−1)/g·b for an all-gather or all-to-all, (g−1)/g of the summed array for a reduce-scatter, twice that for an
all-reduce, and b for a permute. A ragged all-to-all counts twice: the buffer that receives, which has room for all tokens
where one device may get them all, and what a device sends if all get equally many.
"""

import dataclasses
import math
import re

import numpy as np

from maxtext_pp_ext.compiled.program import hlo

BETWEEN_SLICES = "between slices"
RAGGED = "ragged-all-to-all"
COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "collective-permute", "all-to-all", RAGGED)
# The TPU compiler's fused reduce-scatter: an all-reduce in a computation of this name, followed by a slice.
_FUSED_REDUCE_SCATTER = "all-reduce-scatter"
_MESH_GROUPS = re.compile(
    r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((?:\[([0-9,]*)\]T\()?([0-9,]*)\)\)?)?\s*\{([^}]*)\}"
)
_SHAPED_GROUPS = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([0-9,]*)\](?:T\(([0-9,]*)\))?")
# Gathers of scales, norms or routing indices are smaller than this; the weight matrices that matter are larger.
WEIGHT_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
  """One execution of a collective of the program."""

  kind: str  # one of COLLECTIVES, or BETWEEN_SLICES for a transfer over the data-centre network
  wire_bytes: float  # bytes that a device sends; of a ragged all-to-all the bytes of the buffer that receives
  # Bytes that a device sends if all get equally many rows of a ragged all-to-all; else as wire_bytes.
  balanced_bytes: float
  weights: int  # number of its result arrays that are floating-point and have at least WEIGHT_BYTES


def collective_at(
    module: hlo.Module, computation: hlo.Computation, instruction: hlo.Instruction
) -> tuple[hlo.Instruction, Collective] | None:
  """The collective that an instruction is, starts on another thread or is fused with, and where it stands; or None."""
  if inside := collective_inside(module, instruction):
    return inside
  collective = collective_of(module, computation, instruction)
  return (instruction, collective) if collective else None


def collective_inside(module: hlo.Module, instruction: hlo.Instruction) -> tuple[hlo.Instruction, Collective] | None:
  """The collective that an asynchronous call, which runs it on another thread, or a fused reduce-scatter consists of."""
  is_fused = instruction.opcode == "fusion" and any("all-reduce-scatter" in name for name in instruction.called)
  if not is_fused and instruction.opcode not in ("call-start", "async-start"):
    return None
  inside = ((callee, step) for callee in module.callees(instruction) for step in callee.instructions)
  # Of each instruction: itself, before what it consists of.
  found = (
      (step, collective) if (collective := collective_of(module, callee, step)) else collective_inside(module, step)
      for callee, step in inside
  )
  return next(filter(None, found), None)


def collective_of(module: hlo.Module, computation: hlo.Computation, instruction: hlo.Instruction) -> Collective | None:
  """The instruction as a collective; None for other instructions, and for a `-done`, since its `-start` counts."""
  if instruction.opcode == "send":
    sent = _sent_between_slices(instruction)
    return Collective(kind=BETWEEN_SLICES, wire_bytes=sent, balanced_bytes=sent, weights=0)
  if (kind := instruction.opcode.removesuffix("-start")) not in COLLECTIVES:
    return None
  arrays = instruction.arrays
  if instruction.opcode != kind and kind != "all-reduce":
    # The result of a start has operands, results and context side by side. An all-reduce-start has only its results.
    count = len(instruction.operand_names)
    arrays = arrays[count : 2 * count] if len(arrays) >= 2 * count else (max(arrays, key=lambda array: array.bytes),)
  size = sum(array.bytes for array in arrays)
  group = len(first_group(module, instruction))
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
  ends = [[int(end) for end in part.split(":")] for part in target.split(",") if part]
  slices = sum(last[-1] - last[0] + 1 for last in ends)
  share = (slices - 1) / slices
  if kind == "ALL_GATHER":
    return size * (slices - 1)  # the operand is a shard
  return 2 * size * share if kind == "ALL_REDUCE" else size * share


def first_group(module: hlo.Module, instruction: hlo.Instruction) -> tuple[int, ...]:
  """The partitions of a collective's first group, from any of HLO's notations; all partitions if it names no group."""
  if match := _MESH_GROUPS.search(instruction.attributes):
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
  if match := _SHAPED_GROUPS.search(instruction.attributes):
    dims = _integers(match[3])
    numbers = np.arange(math.prod(dims)).reshape(dims)
    if match[4]:
      numbers = numbers.transpose(_integers(match[4]))
    return tuple(numbers.reshape(int(match[1]), int(match[2]))[0].tolist())
  if listed := instruction.attribute(r"replica_groups=\{\{([0-9,]*)\}"):
    return tuple(_integers(listed))
  if (other := instruction.attribute(r"replica_groups=(\S+)")) and other.strip(",") != "{}":
    raise hlo.HloError(f"{instruction.name} has replica_groups={other[:60]}, a notation that is not known.")
  return tuple(range(module.partitions))


def _integers(text: str) -> list[int]:
  return [int(each) for each in text.split(",")]

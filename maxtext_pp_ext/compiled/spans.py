# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Finds the compute that runs while a collective is under way, from scheduled HLO.

A collective is asynchronous if one instruction starts it and another waits for it. In scheduled HLO the instructions in
between run meanwhile. The TPU compiler's SparseCore collectives have three parts: `call-start` loads the program,
`call-update` passes its operands, and `call-done` waits. Bytes can move from `call-update` on, so a span begins there.
"""

from __future__ import annotations

from collections.abc import Iterator
import dataclasses
import functools

from maxtext_pp_ext.compiled import hlo, traffic


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compute:
  """Work of some instructions: dot FLOPs without padding, and whether a Pallas kernel runs. Loops count in full."""

  dot_flops: float = 0.0
  kernels: bool = False

  def __bool__(self) -> bool:
    return self.dot_flops > 0 or self.kernels

  def __add__(self, other: Compute) -> Compute:
    return Compute(dot_flops=self.dot_flops + other.dot_flops, kernels=self.kernels or other.kernels)

  def __mul__(self, times: int) -> Compute:
    return Compute(dot_flops=self.dot_flops * times, kernels=self.kernels and times > 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Span:
  """One collective of the program and the compute that runs while it is under way.

  Attributes:
    name: name of the instruction that starts the collective.
    where: name of the computation that has this instruction.
    collective: kind and bytes of one execution.
    array: the result's type; the largest of several arrays.
    group: number of participants.
    backward: whether the collective belongs to the backward pass.
    executions: number of executions per step.
    depth: number of loops around the collective.
    asynchronous: whether other instructions can run meanwhile.
    meanwhile: compute between start and done.
    instructions: number of instructions between start and done.
  """

  name: str
  where: str
  collective: traffic.Collective
  array: hlo.Array
  group: int
  backward: bool
  executions: int
  depth: int
  asynchronous: bool
  meanwhile: Compute
  instructions: int

  @property
  def wire_bytes(self) -> float:
    """Bytes that a device sends per step."""
    return self.collective.wire_bytes * self.executions


def spans(module: hlo.Module) -> list[Span]:
  """All collectives of a step, in the order of the program's computations."""
  analysis = _Analysis(module)
  return [
      span
      for (name, depth), executions in analysis.executions().items()
      for span in analysis.spans_in(name, depth, executions)
  ]


def collective_at(
    module: hlo.Module, computation: hlo.Computation, instruction: hlo.Instruction
) -> tuple[hlo.Instruction, traffic.Collective] | None:
  """The collective that an instruction is, starts on another thread or is fused with, and where it stands; or None."""
  if inside := collective_inside(module, instruction):
    return inside
  collective = traffic.collective_of(module, computation, instruction)
  return (instruction, collective) if collective else None


def collective_inside(
    module: hlo.Module, instruction: hlo.Instruction
) -> tuple[hlo.Instruction, traffic.Collective] | None:
  """The collective that an asynchronous call, or a fused reduce-scatter, consists of."""
  is_fused = instruction.opcode == "fusion" and any("all-reduce-scatter" in name for name in instruction.called)
  if not is_fused and instruction.opcode not in ("call-start", "async-start"):
    return None
  for callee in module.callees(instruction):
    for step in callee.instructions:
      if collective := traffic.collective_of(module, callee, step):
        return step, collective
      if inside := collective_inside(module, step):
        return inside
  return None


class _Analysis:
  """Loops and compute of one module; each computation is analysed once."""

  def __init__(self, module: hlo.Module):
    self.module = module

  def executions(self) -> dict[tuple[str, int], int]:
    """{(computation, loop depth): executions per step}, callers before callees.

    Threads of collectives are left out.
    """
    counts: dict[tuple[str, int], int] = {}

    def visit(computation: hlo.Computation, depth: int, times: int) -> None:
      counts[computation.name, depth] = counts.get((computation.name, depth), 0) + times
      for instruction in computation.instructions:
        if collective_inside(self.module, instruction) is None:
          for callee in self.module.callees(instruction):
            visit(callee, depth + (instruction.opcode == "while"), times * self.trips(instruction))

    visit(self.module.computations[self.module.entry], 0, 1)
    return counts

  def trips(self, instruction: hlo.Instruction) -> int:
    if instruction.opcode != "while":
      return 1
    count = self.module.trip_count(instruction)
    return 1 if count is None else count

  def spans_in(self, name: str, depth: int, executions: int) -> Iterator[Span]:
    """The collectives that a computation contains, or starts on another thread."""
    computation = self.module.computations[name]
    for index, instruction in enumerate(computation.instructions):
      found = collective_at(self.module, computation, instruction)
      if found is None:
        continue
      source, collective = found
      between = self.between(computation, index)
      arrays = source.arrays or instruction.arrays
      yield Span(
          name=instruction.name,
          where=name,
          collective=collective,
          array=max(arrays, key=lambda array: array.bytes),
          group=traffic.group_size(self.module, source),
          backward="transpose(" in (source.op_name or instruction.op_name) or self.is_backward(name),
          executions=executions,
          depth=depth,
          asynchronous=between is not None,
          meanwhile=sum((self.compute_of(computation, step) for step in between or ()), Compute()),
          instructions=len(between or ()),
      )

  def between(self, computation: hlo.Computation, index: int) -> tuple[hlo.Instruction, ...] | None:
    """The instructions from the start at index, or from its update, to its done; None if it is synchronous."""
    instructions = computation.instructions
    start = instructions[index]
    if not start.opcode.endswith("-start"):
      return None
    current, begin = start.name, index
    for at in range(index + 1, len(instructions)):
      step = instructions[at]
      if current in step.operand_names and step.opcode.endswith("-update"):
        current, begin = step.name, at
      elif current in step.operand_names and step.opcode.endswith("-done"):
        return instructions[begin + 1 : at]
    return None

  def compute_of(self, computation: hlo.Computation, instruction: hlo.Instruction) -> Compute:
    """The compute of one execution of an instruction, including the computations that it calls."""
    own = Compute(
        dot_flops=traffic.dot_flops(computation, instruction, padding=False),
        kernels=instruction.opcode == "custom-call" and "tpu_custom_call" in instruction.attributes,
    )
    called = [self.compute_in(callee.name) for callee in self.module.callees(instruction)]
    if instruction.opcode == "conditional":  # runs one of them
      called = sorted(called, key=lambda branch: (branch.dot_flops, branch.kernels))[-1:]
    return sum(called, Compute()) * self.trips(instruction) + own

  @functools.cache  # noqa: B019 - an analysis lives as long as its module
  def compute_in(self, name: str) -> Compute:
    computation = self.module.computations[name]
    return sum((self.compute_of(computation, step) for step in computation.instructions), Compute())

  @functools.cache  # noqa: B019
  def is_backward(self, name: str) -> bool:
    """Whether most of a computation comes from the transposed program. False for the entry, which has both passes."""
    if name == self.module.entry:
      return False
    named = [step.op_name for step in self.module.computations[name].instructions if step.op_name]
    return 2 * sum("transpose(" in op_name for op_name in named) > len(named)

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Finds the compute that runs while a collective is under way, from scheduled HLO.

A collective is asynchronous if one instruction starts it and another waits for it. In scheduled HLO the instructions in
between run meanwhile. The TPU compiler's SparseCore collectives have three parts: `call-start` loads the program,
`call-update` passes its operands, and `call-done` waits. Bytes can move from `call-update` on, so a span begins there.
"""

from __future__ import annotations

import collections as containers
from collections.abc import Callable, Iterator, Mapping
import dataclasses
import functools

from maxtext_pp_ext.compiled.program import collectives, execution, hlo, products


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compute:
  """Work of some instructions: dot FLOPs without padding, and whether a Pallas kernel runs.

  Loops count in full, branches of a conditional by the share of the devices that take them.
  """

  dot_flops: float = 0.0
  kernels: bool = False

  def __bool__(self) -> bool:
    return self.dot_flops > 0 or self.kernels

  def __add__(self, other: Compute) -> Compute:
    return Compute(dot_flops=self.dot_flops + other.dot_flops, kernels=self.kernels or other.kernels)

  def __mul__(self, times: float) -> Compute:
    return Compute(dot_flops=self.dot_flops * times, kernels=self.kernels and times > 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Span:
  """One collective of the program and the compute that runs while it is under way."""

  name: str  # name of the instruction that starts the collective
  where: str  # name of the computation that has this instruction
  collective: collectives.Collective  # kind and bytes of one execution
  array: hlo.Array  # the result's type; the largest of several arrays
  group: int  # number of participants
  backward: bool  # whether the collective belongs to the backward pass
  executions: float  # number of executions per step, on average over the devices
  depth: int  # number of loops around the collective
  asynchronous: bool  # whether other instructions can run meanwhile
  meanwhile: Compute  # compute between start and done
  instructions: int  # number of instructions between start and done

  @property
  def wire_bytes(self) -> float:
    """Bytes that a device sends per step."""
    return self.collective.wire_bytes * self.executions


def spans(run: execution.Execution) -> Iterator[Span]:
  """All collectives of a step, in the order of the program's computations."""
  # By computation and loop depth: how often each execution runs.
  runs: dict[tuple[str, int], dict[execution.Execution, float]] = {}

  def count(executed: execution.Execution, times: float) -> None:
    of_computation = runs.setdefault((executed.computation.name, executed.loops), containers.defaultdict(float))
    of_computation[executed] += times
    for call in executed.calls():
      count(call.execution, times * call.times)

  count(run, 1.0)
  compute_in = functools.cache(
      lambda executed: sum((compute_of(executed, step) for step in executed.computation.instructions), Compute())
  )

  def compute_of(executed: execution.Execution, instruction: hlo.Instruction) -> Compute:
    """The compute of one execution of an instruction, including the computations that it calls."""
    own = Compute(
        dot_flops=products.dot_flops(executed.computation, instruction, padding=False),
        kernels=instruction.opcode == "custom-call" and "tpu_custom_call" in instruction.attributes,
    )
    return sum((compute_in(call.execution) * call.times for call in executed.called(instruction)), own)

  for (name, depth), alike in runs.items():
    yield from _spans_in(run.module, run.module.computations[name], depth, alike, compute_of)


def _spans_in(
    module: hlo.Module,
    computation: hlo.Computation,
    depth: int,
    runs: Mapping[execution.Execution, float],
    compute_of: Callable[[execution.Execution, hlo.Instruction], Compute],
) -> Iterator[Span]:
  """The collectives that a computation contains, or starts on another thread."""
  executions = sum(runs.values())
  in_backward = computation.name != module.entry and computation.backward_share > 0.5  # the entry has both passes
  for index, instruction in enumerate(computation.instructions):
    if (found := collectives.collective_at(module, computation, instruction)) is None:
      continue
    source, collective = found
    between = _between(computation, index)
    compute = (compute_of(run, step) * (times / executions) for run, times in runs.items() for step in between or ())
    yield Span(
        name=instruction.name,
        where=computation.name,
        collective=collective,
        array=max(source.arrays or instruction.arrays, key=lambda array: array.bytes),
        group=len(collectives.first_group(module, source)),
        backward=in_backward or "transpose(" in (source.op_name or instruction.op_name),
        executions=executions,
        depth=depth,
        asynchronous=between is not None,
        meanwhile=sum(compute, Compute()),
        instructions=len(between or ()),
    )


def _between(computation: hlo.Computation, index: int) -> tuple[hlo.Instruction, ...] | None:
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

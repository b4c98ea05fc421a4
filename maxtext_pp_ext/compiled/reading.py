# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""A compiled train step, read once: how it runs, its collectives and what they carry. All figures come from this.

Collectives carry weights, gradients, activations, or anything else. Ragged all-to-alls dispatch tokens to experts and
combine what these return.

Weights do not depend on the batch. A value that does is an activation (or its gradient) if a matrix multiplication, a
kernel or a scatter is computed from it. It is a weight's gradient if only the new state is computed from it. Integers and
scalars are "elsewhere". With optimizers that multiply matrices, such as Muon, gradients are classified as activations.
"""

from collections.abc import Iterator, Sequence
import dataclasses
from typing import Any

from maxtext_pp_ext.compiled import spans
from maxtext_pp_ext.compiled.program import collectives, dataflow, execution, hlo

WEIGHTS, GRADIENTS, ACTIVATIONS, DISPATCH, ELSEWHERE = "weights", "gradients", "activations", "dispatch", "elsewhere"
PAYLOADS = (WEIGHTS, GRADIENTS, ACTIVATIONS, DISPATCH, ELSEWHERE)
_REDUCTIONS = frozenset({"all-reduce", "reduce-scatter", "collective-permute", collectives.BETWEEN_SLICES})
_COMPUTE = frozenset({"dot", "convolution", "scatter"})
_KERNELS = ("tpu_custom_call", "matmul", "gemm", "cudnn")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
  """A train step."""

  run: execution.Execution  # one run of the program
  collectives: tuple[spans.Span, ...]  # all of them, in the order of the program's computations
  payloads: tuple[str | None, ...]  # of each, one of PAYLOADS; None if the step's arguments have no names


def step(text: str, *, batch: str, optimizer: str) -> Step:
  """Reads a program, the text of optimised HLO.

  `batch` is the prefix of the names of those arguments of the step that are the batch, such as `data[`, and `optimizer`
  that of those that are the optimizer's state. Raises HloError if the text is not that of a whole program, or contains
  something unknown.
  """
  module = hlo.program(text)
  with hlo.reading():
    run = execution.of_module(module)
    found = tuple(spans.spans(run))
    return Step(run=run, collectives=found, payloads=tuple(_payloads(module, found, batch=batch, optimizer=optimizer)))


def _payloads(module: hlo.Module, found: Sequence[spans.Span], *, batch: str, optimizer: str) -> list[str | None]:
  flow = dataflow.Dataflow(module)
  rows, state = _arguments(module, batch), _arguments(module, optimizer)
  if not rows:
    return [None] * len(found)
  of_batch, of_optimizer = flow.depending_on(rows), flow.depending_on(state)
  for_compute = flow.needed_for(_compute(flow))

  def of(span: spans.Span) -> str:
    value = _result(flow, span)
    if not span.array.is_floating or span.array.elements <= 1 or value is None:
      return ELSEWHERE
    if span.collective.kind == collectives.RAGGED:
      return DISPATCH
    if value not in of_batch:
      return WEIGHTS
    if value in for_compute:
      return ACTIVATIONS
    if span.collective.kind in _REDUCTIONS:
      return GRADIENTS
    # A gather that only the new state needs carries an updated weight, or the gradient of the embedding's output.
    return WEIGHTS if value in of_optimizer else ACTIVATIONS

  return [of(span) for span in found]


def _arguments(module: hlo.Module, prefix: str) -> list[dataflow.Value]:
  return [
      (module.entry, step.name, ())
      for step in module.computations[module.entry].instructions
      if step.opcode == "parameter" and step.op_name.replace("\\'", "'").startswith(prefix)
  ]


def _compute(flow: dataflow.Dataflow) -> Iterator[dataflow.Value]:
  """The operands of matrix multiplications, kernels and scatters."""
  for computation, step in flow.module.steps():
    if step.opcode in _COMPUTE or (step.opcode == "custom-call" and any(k in step.attributes for k in _KERNELS)):
      yield from flow.operands(computation, step)


def _result(flow: dataflow.Dataflow, span: spans.Span) -> dataflow.Value | None:
  """The largest array of a collective's result; for an asynchronous collective, of the result of its `-done`."""
  current = flow.module.computations[span.where].by_name[span.name]
  if current.opcode == "send":  # its `-done` does not return the array that was sent
    return flow.values(span.where, current)[0]
  for step in flow.module.computations[span.where].instructions:
    if current.name in step.operand_names and step.opcode.endswith(("-update", "-done")):
      current = step
  values = flow.values(span.where, current)
  if len(values) != len(current.arrays):
    return values[0] if values else None
  largest: Any = max(range(len(values)), key=lambda i: current.arrays[i].bytes, default=None)
  return None if largest is None else values[largest]

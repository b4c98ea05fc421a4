# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""What the collectives of a train step carry, as far as the program tells: weights, gradients, activations, or else.

Weights do not depend on the batch. What does is an activation (or its gradient) if a matrix multiplication, a kernel or
a scatter is still computed from it, and a weight's gradient if nothing but the new state is. Integers and scalars are
"elsewhere". Optimizers that multiply matrices, such as Muon, make activations of gradients here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from maxtext_pp_ext.compiled import dataflow, hlo, spans, traffic

WEIGHTS, GRADIENTS, ACTIVATIONS, ELSEWHERE = "weights", "gradients", "activations", "elsewhere"
CARRIED = (WEIGHTS, GRADIENTS, ACTIVATIONS, ELSEWHERE)
_REDUCTIONS = frozenset({"all-reduce", "reduce-scatter", "collective-permute", traffic.BETWEEN_SLICES})
_COMPUTE = frozenset({"dot", "convolution", "scatter"})
_KERNELS = ("tpu_custom_call", "matmul", "gemm", "cudnn")


def carried(module: hlo.Module, found: Iterable[spans.Span], *, batch: str, optimizer: str) -> list[str | None]:
  """What each collective carries; None if the program's arguments have no names.

  Args:
    module: of a train step.
    found: its collectives.
    batch: what the names of the arguments begin with that are the batch, as `data[`.
    optimizer: what those begin with that are the optimizer's state.
  """
  found = list(found)
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
    if value not in of_batch:
      return WEIGHTS
    if value in for_compute:
      return ACTIVATIONS
    if span.collective.kind in _REDUCTIONS:
      return GRADIENTS
    # Gathered, and only for the new state: an updated weight, or the gradient of the embedding's output.
    return WEIGHTS if value in of_optimizer else ACTIVATIONS

  return [of(span) for span in found]


def _arguments(module: hlo.Module, prefix: str) -> list[dataflow.Value]:
  steps = module.computations[module.entry].instructions
  return [
      (module.entry, step.name, ())
      for step in steps
      if step.opcode == "parameter" and step.op_name.replace("\\'", "'").startswith(prefix)
  ]


def _compute(flow: dataflow.Dataflow) -> list[dataflow.Value]:
  """What goes into matrix multiplications, kernels and scatters."""
  found = []
  for computation in flow.module.computations.values():
    for step in computation.instructions:
      if step.opcode in _COMPUTE or (step.opcode == "custom-call" and any(k in step.attributes for k in _KERNELS)):
        found += flow.operands(computation, step)
  return found


def _result(flow: dataflow.Dataflow, span: spans.Span) -> dataflow.Value | None:
  """The largest array of a collective's result, which an asynchronous one has when it is done."""
  steps = flow.module.computations[span.where].instructions
  current = flow.module.computations[span.where].by_name[span.name]
  if current.opcode == "send":  # what it has sent when it is done is elsewhere
    return flow.values(span.where, current)[0]
  for step in steps:
    if current.name in step.operand_names and step.opcode.endswith(("-update", "-done")):
      current = step
  values = flow.values(span.where, current)
  if len(values) != len(current.arrays):
    return values[0] if values else None
  largest: Any = max(range(len(values)), key=lambda i: current.arrays[i].bytes, default=None)
  return None if largest is None else values[largest]

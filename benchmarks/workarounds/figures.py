# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""What compiled programs send, copy, cast and compute more than they need. Each figure is that of one device."""

from __future__ import annotations

from maxtext_pp_ext.compiled import spans
from maxtext_pp_ext.compiled.program import execution, hlo

_COPIES = frozenset({"copy", "transpose"})
_EXPONENTIALS = frozenset({"exponential", "logistic", "tanh"})
_CYCLES = r'"estimated_cycles":"(\d+)"'
_SMALL_BYTES = 1 << 16  # smaller copies are not counted


def sent(run: execution.Execution) -> float:
  """Bytes that a device sends."""
  return sum(span.wire_bytes for span in spans.spans(run))


def sent_alone(run: execution.Execution) -> float:
  """Bytes that a device sends while it cannot compute."""
  return sum(span.wire_bytes for span in spans.spans(run) if not span.asynchronous)


def copied(run: execution.Execution) -> float:
  """Bytes of arrays that are copied into another layout, as often as they are."""

  def of(_: hlo.Computation, step: hlo.Instruction) -> float:
    size = step.arrays[0].bytes if step.opcode in _COPIES else 0
    return size if size >= _SMALL_BYTES else 0

  return run.total(of)


def cycles(run: execution.Execution) -> float:
  """Cycles that the compiler expects."""
  return run.total(lambda _, step: float(step.attribute(_CYCLES) or 0))


def cast_before_loops(run: execution.Execution) -> float:
  """Bytes of what is cast outside of loops."""
  own = sum(step.arrays[0].bytes for step in run.computation.instructions if step.opcode == "convert")
  return own + sum(call.times * cast_before_loops(call.execution) for call in run.calls() if not call.execution.loops)


def exponentials(run: execution.Execution) -> float:
  """Elements of exponential functions that are computed."""
  return run.total(lambda _, step: step.arrays[0].elements if step.opcode in _EXPONENTIALS else 0)


def rematerialised(run: execution.Execution) -> float:
  """The number of operations that the compiler computes again to save memory."""
  steps = (step for each in run.module.computations.values() for step in each.instructions)
  return sum(".remat" in step.name for step in steps)


def sums_behind_transfer(run: execution.Execution) -> float:
  """The number of float32 sums that the only loop computes when it has begun to send its only permute."""
  module = run.module
  (loop,) = [step for each in module.computations.values() for step in each.instructions if step.opcode == "while"]
  (body,) = module.callees(loop)
  starts = [step.opcode == "collective-permute-start" for step in body.instructions]
  behind = body.instructions[starts.index(True) :]
  return sum(step.opcode == "fusion" and any(array.dtype == "f32" for array in step.arrays) for step in behind)

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""A compiled train step, read once: how it runs, its collectives and what they carry. All figures come from this."""

from __future__ import annotations

import dataclasses

from maxtext_pp_ext.compiled import carried, spans
from maxtext_pp_ext.compiled.program import execution, hlo


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
  """A train step."""

  run: execution.Execution  # one run of the program
  collectives: tuple[spans.Span, ...]  # all of them, in the order of the program's computations
  carries: tuple[str | None, ...]  # what each carries, one of `carried.CARRIED`; None if that cannot be told


def step(text: str, *, batch: str, optimizer: str) -> Step:
  """Reads a program.

  Args:
    text: optimised HLO.
    batch: prefix of the names of those arguments of the step that are the batch.
    optimizer: prefix of the names of those arguments of the step that are the optimizer's state.

  Raises:
    HloError: the text is not that of a whole program, or contains something unknown.
  """
  module = hlo.program(text)
  with hlo.reading():
    run = execution.of_module(module)
    found = tuple(spans.spans(run))
    kinds = carried.carried(module, found, batch=batch, optimizer=optimizer)
    return Step(run=run, collectives=found, carries=tuple(kinds))

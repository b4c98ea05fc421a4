# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""How long gathered weights stay: the only thing in which the circular pipelines differ.

| residency   | gathers per weight and step          | gathered weights held      |
|-------------|--------------------------------------|----------------------------|
| `iteration` | at every iteration, both directions  | none                       |
| `repeat`    | once forward, once backward          | two repeats of a stage     |
| `once`      | once                                 | all repeats of a stage     |
"""

from __future__ import annotations

import enum


class Residency(enum.Enum):
  """When a weight is gathered over the data-like mesh axes.

  The rest of the package asks for what stands in the columns, and for no residency by its name.

  Attributes:
    has_slots: whether a stage keeps gathered weights from one iteration to the next. The gradients of the microbatches of
      a repeat are then summed on each device before they are reduced; otherwise each is reduced at once.
    gathers_first: whether the weights of all repeats are gathered before the first iteration, and kept for backward.
  """

  has_slots: bool
  gathers_first: bool

  #            value        has_slots gathers_first
  ITERATION = ("iteration", False, False)
  REPEAT = ("repeat", True, False)
  ONCE = ("once", True, True)

  def __new__(cls, value: str, has_slots: bool, gathers_first: bool) -> Residency:
    member = object.__new__(cls)
    member._value_ = value
    member.has_slots, member.gathers_first = has_slots, gathers_first
    return member

  @property
  def prefetches(self) -> bool:
    """Whether the next repeat's weights are gathered while a stage works on a repeat."""
    return self.has_slots and not self.gathers_first

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""When weights are gathered, and how long they are kept: the only difference between the circular pipelines.

| gather policy | gathers per weight and step          | gathered weights held      |
|---------------|--------------------------------------|----------------------------|
| `iteration`   | at every iteration, both directions  | none                       |
| `repeat`      | once forward, once backward          | two repeats of a stage     |
| `once`        | once                                 | all repeats of a stage     |
"""

from __future__ import annotations

import enum


class GatherPolicy(enum.Enum):
  """When a weight is gathered over the data-like mesh axes.

  The rest of the package reads these attributes and never compares gather policies by name.
  """

  # Whether a stage keeps gathered weights from one iteration to the next. If so, each device sums the gradients of a
  # repeat's microbatches before they are reduced; otherwise each gradient is reduced at once.
  keeps_gathered: bool
  gathers_first: bool  # whether the weights of all repeats are gathered before the first iteration, and kept for backward

  #            value        keeps_gathered gathers_first
  ITERATION = ("iteration", False, False)
  REPEAT = ("repeat", True, False)
  ONCE = ("once", True, True)

  def __new__(cls, value: str, keeps_gathered: bool, gathers_first: bool) -> GatherPolicy:
    member = object.__new__(cls)
    member._value_ = value
    member.keeps_gathered, member.gathers_first = keeps_gathered, gathers_first
    return member

  @property
  def prefetches(self) -> bool:
    """Whether the next repeat's weights are gathered while a stage works on a repeat."""
    return self.keeps_gathered and not self.gathers_first

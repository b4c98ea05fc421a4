# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""A weight with one microbatch: a repeat arrives whole and takes the place of the one before.

The gradient of an iteration is the sum of a repeat: it waits for its reduction where it is computed.
"""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any, Self

import jax

from maxtext_pp_ext.engine.per_stage import Layout, OnStage
from maxtext_pp_ext.engine.transfers.memory_order import in_memory, of_one_stage
from maxtext_pp_ext.engine.weights.accumulators import Accumulated, Item, Operands
from maxtext_pp_ext.engine.weights.weight import there, Weight


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class WholeWeight(Weight):
  """A weight of which each iteration, with its only microbatch, replaces the whole."""

  replaces = True
  has_next_buffer = False
  sums_wait_in_buffers = False
  _finishes_in_place = False
  _waits_beside = False

  @property
  def _waiting(self) -> tuple[Any, Layout]:
    return self.total, self.layout.by_device

  @property
  def overlapped(self) -> Sequence[str]:
    return (self.reduced,)  # gathers have until the iteration's end

  @property
  def gradient_order(self) -> tuple[int, ...]:
    """As products read the weight, but the last dimension is not scattered.

    Parts of the last one would be narrower than a tile. A product writes this order, too; any other would be a copy.
    """
    order = super().gradient_order
    if len(order) < 3 or not self.layout.gathered_axes[order[-1] - 1]:
      return order
    return (*order[:-2], order[-1], order[-2])

  @property
  def _order_of_chunks(self) -> list[int]:
    return of_one_stage(self.gradient_order)

  def ordered(self) -> Self:
    return self  # the compiler lays out each repeat anew

  def _current(self, weight: jax.Array) -> jax.Array:
    return weight

  def place(self) -> OnStage | None:
    if self.arriving is None:
      return None
    transfer = self.transfer
    # A repeat that is gathered in steps is put in its order before the last one. A gather at once is along the major
    # dimension: another order would be a copy of the whole.
    in_order: Callable = self._in_order if self.order and transfer.in_steps else lambda weight: weight
    whole = lambda repeat, chunk, arriving: in_order(arriving[0])[None, None]
    return OnStage(whole, [self.arriving], [self.layout.chunk(transfer)], self.layout.buffers)

  def accumulate(self, operands: Operands, item: Item) -> Accumulated:
    gradient = self._computed(operands).astype(there(self.total).dtype)
    return Accumulated(in_memory(gradient, [0, *(1 + dim for dim in self.gradient_order)]))

  def finish_repeat(self) -> OnStage | None:
    return None

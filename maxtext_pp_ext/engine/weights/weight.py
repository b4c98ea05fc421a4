# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""One weight of the pipelined layers: where its arrays are, and what the engine does with it.

With the gather policy `repeat`, each stage has a double buffer that slides over its repeats. The stage computes with the
current buffer, while its next repeat is gathered into the other one, chunk by chunk. When that repeat begins, the two
change places. No weight is copied, and no stage holds a third repeat. A stage waits for a gather only if the compiler
does not overlap it (`is_gather_overlapped`). With one microbatch, `whole.py` replaces some methods.

Backward sums a gradient up over the microbatches of a repeat, then over devices. An iteration may leave a gradient as a
partial sum (`programs/partial.py`). Each device accumulates such gradients over the M items of a repeat. When a stage has
finished a repeat, its sum is cast to the compute dtype and reduced, one chunk per iteration, while the stage works on the
repeat before. Each of these iterations also gathers one chunk of the weight. It takes the place of the chunk of the sum
that has just left: the sum waits in the next buffer. A complete gradient is added to its place in the stored layout.

The sum's buffer is the current one before. So the last of the M summands is computed only after the last read of the
weight. The matrix product that computes it adds the sum, casts it and writes it there. Each stage does so in another
iteration, and all wait for it. A separate cast would make these iterations longer: with M = 2·S every second one.
"""

from collections.abc import Sequence
import dataclasses
import functools
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from maxtext_pp_ext.engine.per_stage import Layout, OnStage
from maxtext_pp_ext.engine.programs.one_of import OneOf
from maxtext_pp_ext.engine.programs.partial import Gradient
from maxtext_pp_ext.engine.shapes import Accumulator, Buffers, Chunk, Numbers, OfRepeat, Param
from maxtext_pp_ext.engine.transfers.memory_order import in_memory, of_one_stage
from maxtext_pp_ext.engine.transfers.transfer import Transfer
from maxtext_pp_ext.engine.weights.accumulators import Accumulated, add_and_finish, add_to, Item, Operands, put_finished
from maxtext_pp_ext.engine.weights.layout import memory, WeightLayout
from maxtext_pp_ext.schedule import GatherPolicy
from maxtext_pp_ext.sharding import constrain


def _static(**given: Any) -> Any:
  return dataclasses.field(metadata={"static": True}, **given)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Weight:
  """A weight, and what there is of it at the moment; None for arrays that are not there.

  A loop carries only the arrays of `of_all.Carried`. A method that returns an `OnStage` computes nothing:
  `per_stage.together` runs it on each stage, with the indices that its docstring names first, as in (repeat, chunk).
  """

  layout: WeightLayout = _static()  # layouts and dtypes
  mesh: Mesh = _static()  # the device mesh
  gather_policy: GatherPolicy = _static()  # when the weight is gathered, and how long it is kept
  shape: tuple[int, ...] = _static()  # [R, S, …]
  dtype: jnp.dtype = _static()  # in which it is stored
  chunks: int = _static()  # the number of chunks in which a repeat is gathered, and its gradient reduced
  # the dimensions [S, …] from major to minor in memory, as the products of the stages read them; () for row-major
  order: tuple[int, ...] = _static(default=())
  of_kernels: bool = _static(default=False)  # whether kernels read it, and nothing else does
  # how backward computes its gradient; None before the stages are traced
  gradient: Gradient | None = _static(default=None)
  source: Param | None = None  # what it is gathered from: the parameter, or all repeats gathered
  current: OfRepeat | None = None  # the repeat that the stages are at, between forward and backward
  # [B, F, S, …], each buffer in the layout `by_device`. B is 2, or 1 if there is one repeat, or one chunk. A stage at
  # repeat r computes with buffer r mod B, the current one; the other is its next. Each of the F devices has a copy. The
  # copies are equal once all chunks have arrived. Before, in backward, each holds its device's summand of a finished sum.
  buffers: Buffers | None = None
  arriving: Chunk | None = None  # a chunk that is gathered and not yet in its place
  # the sum of the repeat that each stage is at, in the dtype in which microbatches are summed
  total: Accumulator | None = None
  # the sum of the repeat that each stage has finished, in the compute dtype, if it waits beside the buffers
  finished: Accumulator | None = None
  leaving: Chunk | None = None  # a chunk of a finished sum, before its reduction
  scattered: Chunk | None = None  # a chunk that is scattered, and to be summed over replicas in other slices
  # gradients summed over microbatches and devices, laid out as the parameter is stored. Those that were partial sums are
  # in the compute dtype.
  stored: Param | None = None

  def with_(self, **arrays: Any) -> Self:
    """The same weight with other arrays, or with more that is known of it."""
    return dataclasses.replace(self, **arrays)

  def added(self, arrays: Accumulated) -> Self:
    """With the result of `accumulate`."""
    return self.with_(**{name: x for name, x in arrays._asdict().items() if x is not None})

  # What is known of it.

  @property
  def replaces(self) -> bool:
    """Whether a repeat takes the place of the one before, instead of arriving beside it."""
    return False

  @property
  def has_buffers(self) -> bool:
    """Whether it is gathered, or cast from the dtype in which it is stored, into buffers."""
    return self.gather_policy.prefetches and (self.layout.needs_gather or self.layout.compute_dtype != self.dtype)

  @property
  def is_partial(self) -> bool:
    """Whether an iteration leaves its gradient as a partial sum."""
    return self.gradient is not None and self.gradient.is_partial

  @property
  def transfer(self) -> Transfer:
    """How chunks of it are transferred."""
    return self.layout.transfer(self.mesh, self.shape, self.chunks)

  @property
  def is_gather_overlapped(self) -> bool:
    """Whether devices compute while it is gathered into buffers."""
    return self.has_buffers and self.transfer.is_gather_asynchronous

  @property
  def is_reduction_exposed(self) -> bool:
    """Whether devices compute nothing while its gradient is reduced, or scattered."""
    return self.is_partial and not self.transfer.is_asynchronous

  @property
  def has_next_buffer(self) -> bool:
    """Whether there is a next buffer beside the current one."""
    return self.gather_policy.prefetches and self.shape[0] > 1

  @property
  def sums_wait_in_buffers(self) -> bool:
    """Whether finished sums wait in the next buffer.

    If the last chunk has elements of the one before (`Cut`), its weights would overwrite a sum that is not reduced yet.
    """
    return self.has_buffers and self.transfer.moves_once

  @property
  def where_sums_wait(self) -> str:
    """The array in which finished sums wait."""
    return "buffers" if self.sums_wait_in_buffers else "finished"

  @property
  def _finishes_in_place(self) -> bool:
    """Whether the product that computes a gradient also writes the finished sum to where it waits.

    A vector is not worth a branch. The compiler adds and casts it in no time.
    """
    return self.is_partial and there(self.gradient).on_device is not None and len(self.shape) > 3

  @property
  def _source_spec(self) -> P:
    """The PartitionSpec of one repeat of `source`, [S, …]."""
    return self.layout.gathered if self.gather_policy.gathers_first else self.layout.sharded

  @property
  def _source_layout(self) -> Layout:
    return Layout(P(None, *self._source_spec), 1)

  @property
  def _waiting(self) -> tuple[Any, Layout]:
    """(the finished sums where they wait, their layout)."""
    return (self.buffers, self.layout.buffers) if self.sums_wait_in_buffers else (self.finished, self.layout.by_device)

  # Gathers.

  def load(self, param: Param) -> Self:
    """With its source. If weights stay gathered for the whole step, this gathers all repeats, in the compute dtype."""
    if self.gather_policy.gathers_first:
      param = param.astype(self.layout.compute_dtype)
    return self.with_(source=constrain(param, self._source_layout.spec, self.mesh))

  def keep(self, param: Param) -> Self:
    """With what backward gathers from: the parameter, if `load` did not gather.

    Where `load` changes the order of shards, backward changes it again, so that no copy is held in between.
    """
    return self if self.gather_policy.gathers_first else self.with_(source=param)

  def first(self) -> Self:
    """With repeat 0 of all stages as the current one."""
    if not self.has_buffers:
      return self
    shard = constrain(there(self.source)[0], self.layout.sharded, self.mesh)
    current = constrain(shard.astype(self.layout.compute_dtype), self.layout.gathered, self.mesh)
    return self.with_(current=current)

  def open(self, repeat: int) -> Self:
    """With the current repeat in the buffer of this number, and with an empty next buffer."""
    if self.current is None:
      return self
    by_device = jnp.broadcast_to(self.current, (self.layout.parts(self.mesh), *self.current.shape))
    buffers = by_device[None]
    if self.has_next_buffer:
      empty = jax.lax.empty((2, *by_device.shape), by_device.dtype)
      buffers = jax.lax.dynamic_update_index_in_dim(empty, by_device, repeat % 2, axis=0)
    return self.with_(buffers=constrain(buffers, self.layout.buffers.spec, self.mesh), current=None)

  def ordered(self) -> Self:
    """With the dimensions of the buffers in their order in memory."""
    if self.buffers is None or not self.order:
      return self
    return self.with_(buffers=in_memory(self.buffers, [0, 1, *(2 + dim for dim in self.order)]))

  def gather(self) -> OnStage | None:
    """(repeat, number of a chunk) -> the chunk."""
    if self.buffers is None:
      return None
    transfer, dtype, order = self.transfer, self.layout.compute_dtype, self._order_of_chunks
    gather = lambda repeat, chunk, source: transfer.gather(source, repeat, chunk, dtype, order)[None]
    return OnStage(gather, [there(self.source)], [self._source_layout], self.layout.chunk(transfer))

  def place(self) -> OnStage | None:
    """(repeat that the stage is at, number of the arriving chunk) -> the buffers with the chunk in the next one."""
    if self.arriving is None:
      return None
    transfer = self.transfer

    def put(repeat, chunk, buffers, arriving):
      return transfer.place(arriving[0], buffers, next_buffer(repeat), chunk)

    layouts = [self.layout.buffers, self.layout.chunk(transfer)]
    return OnStage(put, [there(self.buffers), self.arriving], layouts, self.layout.buffers)

  def use(self) -> OnStage:
    """(repeat) -> the gathered weight; of one that kernels read both buffers, [B, S, …]."""
    if self.buffers is None:
      own = lambda repeat, all_: _take(repeat, all_).astype(self.layout.compute_dtype)
      return OnStage(own, [there(self.source)], [self._source_layout], Layout(self._source_spec, 0))
    if self._is_one_of:
      both = lambda _, buffers: buffers[:, 0]
      return OnStage(both, [self.buffers], [self.layout.buffers], Layout(P(None, *self.layout.gathered), 1))
    current = lambda repeat, buffers: self._current(_take(repeat % buffers.shape[0], buffers)[0])
    return OnStage(current, [self.buffers], [self.layout.buffers], Layout(self.layout.gathered, 0))

  def _current(self, weight: jax.Array) -> jax.Array:
    # Else the compiler (libtpu 0.0.48.1; benchmarks.workarounds order_of_weight_in_use) may convert it at each use.
    return self._in_order(weight)

  def used(self, weight: jax.Array, repeat: Numbers) -> jax.Array | OneOf:
    """The result of `use`, as stages read it. Laid out at each use, so that loops carry it in this layout."""
    if not self._is_one_of:
      return constrain(weight, self.layout.gathered, self.mesh)
    return OneOf(constrain(weight, P(None, *self.layout.gathered), self.mesh), repeat % weight.shape[0])

  def close(self) -> OnStage | None:
    """(repeat) -> the current repeat, which backward begins with."""
    return None if self.buffers is None else self.with_(of_kernels=False).use()

  @property
  def _is_one_of(self) -> bool:
    return self.of_kernels and self.buffers is not None and self.buffers.shape[0] > 1

  def _in_order(self, weight: jax.Array) -> jax.Array:
    """A stage's weight, […], with its dimensions in their order in memory."""
    return in_memory(weight, of_one_stage(self.order) or range(weight.ndim))

  # Gradients.

  def zeros(self, behind: jax.Array | None = None) -> Self:
    """With the sums before the first item; partial sums have any value, since they begin anew with each repeat.

    `behind` is as in `layout.memory`. A single gradient is small beside those of all repeats: it waits for nothing.
    """
    layout = self.layout
    like = functools.partial(layout.by_device_like, behind=None if self.replaces else behind)
    if not self.is_partial:
      nothing = jnp.full(self.shape, layout.combine.nothing, layout.accumulation_dtype)
      return self.with_(stored=constrain(nothing, self.layout.stored.spec, self.mesh))
    stored = memory(self.mesh, self.layout.stored.spec, self.shape, layout.compute_dtype, behind)
    total = like(self.mesh, self.shape[1:], layout.accumulation_dtype)
    finished = like(self.mesh, self.shape[1:], layout.compute_dtype) if self._waits_beside else None
    return self.with_(stored=stored, total=total, finished=finished)

  @property
  def _waits_beside(self) -> bool:
    return not self.sums_wait_in_buffers and self.shape[0] > 1

  @property
  def overlapped(self) -> Sequence[str]:
    """The arrays whose transfers must have ended before its gradient of the same iteration begins."""
    return self.reduced, "arriving"

  @property
  def reduced(self) -> str:
    """The array with which a finished sum has left its memory. Sums over replicas in other slices may end later."""
    return "stored" if self.scattered is None else "scattered"

  def accumulate(self, operands: Operands, item: Item) -> Accumulated:
    """What changes when an iteration's gradient, a partial sum, is added to the sum."""
    total = there(self.total)
    if item.finishes is None or not self._finishes_in_place:
      return Accumulated(add_to(total, self._computed(operands), item))
    on_device = there(self.gradient).on_device
    waiting, place = self._waiting
    total, waiting = add_and_finish(
        self.mesh, self.layout.by_device, place, on_device, total, waiting, operands.of_roots[0], item
    )
    return Accumulated(total, **{self.where_sums_wait: waiting})

  def _computed(self, operands: Operands) -> Accumulator:
    gradient = there(self.gradient).compute(*operands)
    return constrain(gradient, self.layout.by_device.spec, self.mesh)

  def add_complete(self, gradient: OfRepeat | None) -> OnStage | None:
    """(repeat, whether the stage works) -> complete sums with an iteration's gradient; None if that is a partial sum."""
    if gradient is None:
      return None
    combine = self.layout.combine

    def add(repeat, works, all_, g):
      old = _take(repeat, all_)
      g = jnp.where(works, g.astype(old.dtype), jnp.full_like(old, combine.nothing))
      return jax.lax.dynamic_update_index_in_dim(all_, combine.add(old, g), repeat, 0)

    args = [there(self.stored), constrain(gradient, self.layout.sharded, self.mesh)]
    return OnStage(add, args, [self.layout.stored, Layout(self.layout.sharded, 0)], self.layout.stored)

  def finish_repeat(self) -> OnStage | None:
    """(repeat) -> where sums wait, with the total; None if `accumulate` has put it there."""
    if not self.is_partial or self._finishes_in_place:
      return None
    waiting, place = self._waiting
    put = lambda repeat, total, waiting: put_finished(total, waiting, repeat, self.sums_wait_in_buffers)
    return OnStage(put, [there(self.total), waiting], [self.layout.by_device, place], place)

  def cut_out(self) -> OnStage | None:
    """(repeat that the stage is at, number of a chunk) -> the chunk of the finished sum, in the compute dtype."""
    if not self.is_partial:
      return None
    waiting, place = self._waiting
    transfer, in_buffers = self.transfer, self.sums_wait_in_buffers
    order = of_one_stage(self.gradient_order)

    def cut(repeat, chunk, sums):
      all_, number = (sums, next_buffer(repeat)) if in_buffers else (sums[None], 0)
      return transfer.cut_out(all_, number, chunk, order).astype(self.layout.compute_dtype)

    return OnStage(cut, [waiting], [place], self.layout.chunk(transfer))

  def cut_out_total(self) -> OnStage | None:
    """(number of the chunk) -> the total, in the compute dtype; for a weight with one chunk."""
    if not self.is_partial:
      return None
    transfer = self.transfer
    total = there(self.total).astype(self.layout.compute_dtype)
    cut = lambda chunk, total: transfer.cut_out(total[None], 0, chunk)
    return OnStage(cut, [total], [self.layout.by_device], self.layout.chunk(transfer))

  def scatter(self) -> OnStage | None:
    """(repeat, number of the leaving chunk) -> the chunk, scattered; None if all is done at once."""
    transfer, axes, order = self.transfer, self.layout.partial_axes, self._order_of_chunks
    if self.leaving is None or not transfer.summed_after:
      return None
    scatter = lambda repeat, chunk, leaving: transfer.scatter(leaving[0], axes, order)[None]
    return OnStage(scatter, [self.leaving], [self.layout.chunk(transfer)], self.layout.scattered(transfer))

  def reduce(self) -> OnStage | None:
    """(repeat of the sum, number of the leaving chunk) -> complete sums with the chunk, reduced over devices."""
    transfer, axes, order = self.transfer, self.layout.partial_axes, self._order_of_chunks
    if self.scattered is not None:
      put = lambda repeat, chunk, part, stored: transfer.put(part[0], stored, repeat, chunk)
      args, layout = [self.scattered], self.layout.scattered(transfer)
    elif self.leaving is not None:
      whole = lambda part: transfer.scatter(part[0], axes, order)
      put = lambda repeat, chunk, part, stored: transfer.put(whole(part), stored, repeat, chunk)
      args, layout = [self.leaving], self.layout.chunk(transfer)
    else:
      return None
    return OnStage(put, [*args, there(self.stored)], [layout, self.layout.stored], self.layout.stored)

  @property
  def gradient_order(self) -> tuple[int, ...]:
    """The dimensions [S, …] of its gradient from major to minor in memory."""
    return self.order or tuple(range(len(self.shape) - 1))

  @property
  def _order_of_chunks(self) -> list[int]:
    """The dimensions of chunks in the order of the products; [] for row-major, and for a sum that leaves whole."""
    order = of_one_stage(self.order) if self.chunks > 1 else []
    return order if order != sorted(order) else []


def there[T](array: T | None) -> T:
  """An array that a weight has at this point of an iteration."""
  if array is None:
    raise RuntimeError("A weight is used before its array is there.")
  return array


def next_buffer(repeat: jax.Array) -> jax.Array:
  """The number of the next buffer of a stage that is at a repeat; the buffer of the repeats before and after it."""
  return (repeat + 1) % 2


def _take(index: jax.Array, all_: jax.Array) -> jax.Array:
  return jax.lax.dynamic_index_in_dim(all_, index, keepdims=False)

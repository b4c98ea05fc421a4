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

from collections.abc import Callable, Sequence
import dataclasses
import enum
import math
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, PartitionSpec as P
import jax.numpy as jnp

from maxtext_pp_ext.engine.partial import BatchSplit
from maxtext_pp_ext.sharding import constrain
from maxtext_pp_ext.sharding.resolve import mesh_axes

PyTree = Any


class Residency(enum.Enum):
  """When a weight is gathered over the data-like mesh axes."""

  ITERATION = "iteration"
  REPEAT = "repeat"
  ONCE = "once"


class Combination(NamedTuple):
  """How the gradients that a weight gets from several microbatches become one.

  Attributes:
    add: (a, b) -> both, elementwise, associative and commutative.
    nothing: the value that adds nothing; what accumulators begin with and what a bubble contributes.
  """

  add: Callable[[jax.Array, jax.Array], jax.Array]
  nothing: float


SUM = Combination(jnp.add, 0.0)
# For state whose "gradient" is its next value, found from the largest element of an activation: the next value for all
# microbatches together is the largest of theirs. (Flax's fp8 scales and amax histories; its own dtype for them, fm32,
# adds so.)
MAX = Combination(jnp.maximum, -math.inf)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightLayout:
  """Layouts and dtypes of one parameter; leaves of the tree that `Weights` works on. Specs are without the repeat axis.

  Attributes:
    sharded: PartitionSpec [S, …] as stored.
    gathered: PartitionSpec [S, …] as a stage computes with it.
    partial_axes: mesh axes over which an iteration's gradient is left as a partial sum, with one part per device along a
      leading axis (see `partial.py`); empty if it is complete.
    compute_dtype: dtype in which it is gathered and handed to the stage.
    accumulation_dtype: dtype in which its gradient is summed over the microbatches of a window.
    combine: what takes the place of that sum. Other than SUM there are no partial sums: `partial_axes` must be empty.
  """

  sharded: P
  gathered: P
  partial_axes: tuple[str, ...]
  compute_dtype: jnp.dtype
  accumulation_dtype: jnp.dtype
  combine: Combination = SUM


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weights:
  """Fetches repeats of the weights [R, S, …] and reduces their gradients, as a residency says.

  `layouts` has the parameters' tree with a WeightLayout at each leaf.
  """

  residency: Residency
  mesh: Mesh
  layouts: PyTree

  def _map(self, fn, *trees: PyTree) -> PyTree:
    return jax.tree.map(fn, self.layouts, *trees, is_leaf=lambda x: isinstance(x, WeightLayout))

  def load(self, params: PyTree) -> PyTree:
    """What the loops fetch from: [R, S, …]. Gathers here if weights stay gathered for the whole step."""
    if self.residency is not Residency.ONCE:
      return params
    return self._map(
        lambda layout, w: constrain(w.astype(layout.compute_dtype), P(None, *layout.gathered), self.mesh), params
    )

  def keep(self, params: PyTree, loaded: PyTree) -> PyTree:
    """What backward fetches from: the gathered weights if they stay for the whole step, else the parameters."""
    return loaded if self.residency is Residency.ONCE else params

  def fetch(self, loaded: PyTree, repeat: jax.Array | int) -> PyTree:
    """One repeat's weights [S, …] for a slot of the window; gathered unless they are gathered at each use."""

    def one(layout, w):
      # The barrier keeps the compiler from casting all repeats before the loop instead of one repeat in it.
      w = jax.lax.optimization_barrier(jax.lax.dynamic_index_in_dim(w, repeat, axis=0, keepdims=False))
      w = w.astype(layout.compute_dtype)
      if self.residency is Residency.ITERATION:
        return constrain(w, layout.sharded, self.mesh)
      if self.residency is Residency.REPEAT:
        w = constrain(w, layout.sharded, self.mesh)  # slice first, so that only one repeat is gathered
      return constrain(w, layout.gathered, self.mesh)

    return self._map(one, loaded)

  def use(self, slot: PyTree) -> PyTree:
    """The weights of an iteration, gathered."""
    if self.residency is Residency.ITERATION:
      return self._map(lambda layout, w: constrain(w, layout.gathered, self.mesh), slot)
    return slot

  def select(self, use_first: jax.Array, first: PyTree, second: PyTree) -> PyTree:
    """Per stage one of two slots. `use_first` is a bool [S]."""
    return jax.tree.map(lambda a, b: jnp.where(_over(use_first, a), a, b), first, second)

  def splits(self, batch: Sequence[tuple[int, tuple[str, ...]]]) -> list[list[BatchSplit]]:
    """Into how many parts each weight's gradient is to be left, for batch axes of these sizes and mesh axes."""

    def of(layout):
      owned = {a for entry in layout.gathered for a in mesh_axes(entry)}
      parts = [math.prod(self.mesh.shape[a] for a in axes if a in layout.partial_axes) for _, axes in batch]
      # Where the weight keeps an axis that shards the batch too (experts), an operation outside of a shard_map sums over
      # that axis as well, and the compiler has to be free to choose how.
      whole = any(a in owned for _, axes in batch for a in axes)
      return [BatchSplit(None if whole else size, n) for (size, _), n in zip(batch, parts, strict=True)]

    return self._map(of)

  def with_partials(self, parts: list[int]) -> Weights:
    """The same with `partial_axes` only where a gradient has more than one part."""
    leaves = self._map(lambda layout, n: layout if n > 1 else dataclasses.replace(layout, partial_axes=()), parts)
    return dataclasses.replace(self, layouts=leaves)

  def _parts(self, layout: WeightLayout) -> int:
    return math.prod(self.mesh.shape[a] for a in layout.partial_axes)

  def _constrain_accumulator(self, layout: WeightLayout, acc: jax.Array) -> jax.Array:
    """Lays [F, S, …] out like the weights that a stage computes with, and one part per device."""
    return constrain(acc, self._accumulator_spec(layout), self.mesh)

  def _accumulator_spec(self, layout: WeightLayout) -> P:
    if self.residency is Residency.ITERATION:
      return P(None, *layout.sharded)
    if layout.partial_axes:
      return P(layout.partial_axes, *layout.gathered)
    # Where the sum over the batch is the compiler's to complete, pinning the gathered dimensions would have it do so,
    # and gather the result, at every iteration. What is not gathered stays as it is in the weights.
    return P(None, *(P.UNCONSTRAINED if entry is None else entry for entry in layout.gathered))

  def zero_gradient(self, slot: PyTree) -> PyTree:
    """Empty accumulators [F, S, …] for one slot."""

    def zero(layout, w):
      acc = jnp.full((self._parts(layout), *w.shape), layout.combine.nothing, layout.accumulation_dtype)
      return self._constrain_accumulator(layout, acc)

    return self._map(zero, slot)

  def accumulate(self, total: PyTree, gradient: PyTree, where: jax.Array | None = None) -> PyTree:
    """Adds one iteration's gradient [F, S, …], of the stages in the bool [S] `where` only (a NaN elsewhere stays out)."""

    def add(layout, acc, g):
      g = self._constrain_accumulator(layout, g)
      if where is not None:
        g = jnp.where(_of_stages(where, g), g, jnp.full_like(g, layout.combine.nothing))
      return layout.combine.add(acc, g.astype(acc.dtype))

    return self._map(add, total, gradient)

  def no_sums(self, total: PyTree) -> PyTree:
    """A buffer for `flush`, like accumulators but in the dtype that travels."""
    zeros = lambda layout, acc: self._constrain_accumulator(layout, jnp.zeros(acc.shape, layout.compute_dtype))
    return self._map(zeros, total)

  def flush(self, total: PyTree, done: PyTree, where: jax.Array) -> tuple[PyTree, PyTree]:
    """Moves the sums of the stages in the bool [S] `where` from the accumulators to `done`: (total, done)."""

    def move(layout, acc, moved):
      mask = _of_stages(where, acc)
      moved = jnp.where(mask, acc.astype(moved.dtype), moved)
      # Moved before it is cleared, so that the accumulator can be cleared in place.
      acc, moved = jax.lax.optimization_barrier((acc, moved))
      return jnp.where(mask, jnp.full_like(acc, layout.combine.nothing), acc), moved

    pairs = self._map(move, total, done)
    return jax.tree.transpose(jax.tree.structure(total), None, pairs)

  def reduce(self, total: PyTree) -> PyTree:
    """Sums accumulators [F, S, …] over parts and data-like mesh axes into the stored layout [S, …].

    The sum travels in the dtype in which each iteration's gradient was computed, as in the host's own reductions.
    """
    return self._map(self._reduce, total)

  def _reduce(self, layout: WeightLayout, acc: jax.Array) -> jax.Array:
    wire = acc.astype(layout.compute_dtype)
    if layout.partial_axes:
      return constrain(self._reduce_scatter(layout, wire), layout.sharded, self.mesh)
    if self.residency is not Residency.ITERATION:
      # With the stored layout alone the compiler would propagate it into the loops and reduce at every iteration.
      wire = constrain(wire, P(None, *layout.gathered), self.mesh)
    return constrain(wire[0], layout.sharded, self.mesh)

  def _reduce_scatter(self, layout: WeightLayout, wire: jax.Array) -> jax.Array:
    """[F, S, …] in the accumulators' layout to [S, …], sharded over the partial axes that shard the weight as stored."""
    scattered = [tuple(a for a in mesh_axes(stored) if a in layout.partial_axes) for stored in layout.sharded]
    rest = tuple(a for a in layout.partial_axes if not any(a in axes for axes in scattered))

    def body(part):  # [1, S / stages, …]
      x = part[0]
      for dimension, axes in enumerate(scattered):
        if axes:
          x = jax.lax.psum_scatter(x, axes, scatter_dimension=dimension, tiled=True)
      return jax.lax.psum(x, rest) if rest else x

    out_spec = P(*((*mesh_axes(kept), *axes) or None for kept, axes in zip(layout.gathered, scattered, strict=True)))
    spec = self._accumulator_spec(layout)
    return jax.shard_map(body, mesh=self.mesh, in_specs=spec, out_specs=out_spec, check_vma=False)(
        constrain(wire, spec, self.mesh)
    )

  def empty_gradient(self, params: PyTree) -> PyTree:
    """A gradient buffer [R, S, …] like the parameters, in their stored layout."""
    return self._map(
        lambda layout, w: constrain(jnp.zeros(w.shape, w.dtype), P(None, *layout.sharded), self.mesh), params
    )

  def write_gradient(self, dparams: PyTree, repeat: jax.Array | int, gradient: PyTree) -> PyTree:
    """Writes one repeat's reduced gradient [S, …] into the buffer, in the parameters' dtypes."""
    return jax.tree.map(
        lambda all_, one: jax.lax.dynamic_update_index_in_dim(all_, one.astype(all_.dtype), repeat, axis=0),
        dparams,
        gradient,
    )


def _of_stages(mask: jax.Array, x: jax.Array) -> jax.Array:
  """A mask [S] shaped to broadcast against x [F, S, …]."""
  return mask.reshape((1, -1) + (1,) * (x.ndim - 2))


def _over(mask: jax.Array, x: jax.Array) -> jax.Array:
  """A mask [S] shaped to broadcast against x [S, …]."""
  return mask.reshape(mask.shape + (1,) * (x.ndim - 1))

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

import dataclasses
import enum
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec as P
import jax.numpy as jnp

from maxtext_pp_ext.sharding import constrain

PyTree = Any


class Residency(enum.Enum):
  """When a weight is gathered over the data-like mesh axes."""

  ITERATION = "iteration"
  REPEAT = "repeat"
  ONCE = "once"


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightLayout:
  """Layouts and dtypes of one parameter; leaves of the tree that `Weights` works on. Specs are without the repeat axis.

  Attributes:
    sharded: PartitionSpec [S, …] as stored.
    gathered: PartitionSpec [S, …] as a stage computes with it.
    compute_dtype: dtype in which it is gathered and handed to the stage.
    accumulation_dtype: dtype in which its gradient is summed over the microbatches of a window.
  """

  sharded: P
  gathered: P
  compute_dtype: jnp.dtype
  accumulation_dtype: jnp.dtype


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
      w = jax.lax.dynamic_index_in_dim(w, repeat, axis=0, keepdims=False).astype(layout.compute_dtype)
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

  def zero_gradient(self, slot: PyTree) -> PyTree:
    """Zero accumulators [S, …] for one slot."""
    return self._map(lambda layout, w: jnp.zeros(w.shape, layout.accumulation_dtype), slot)

  def accumulate(self, total: PyTree, gradient: PyTree, where: jax.Array | None = None) -> PyTree:
    """Adds one iteration's gradient, of the stages in the bool [S] `where` only (a NaN elsewhere stays out)."""

    def add(layout, acc, g):
      if self.residency is Residency.ITERATION:
        g = constrain(g, layout.sharded, self.mesh)
      if where is not None:
        g = jnp.where(_over(where, g), g, jnp.zeros_like(g))
      return acc + g.astype(acc.dtype)

    return self._map(add, total, gradient)

  def reduce(self, total: PyTree) -> PyTree:
    """Sums accumulators over the data-like mesh axes into the stored layout [S, …], in the accumulation dtype.

    The layout is first pinned as gathered, then as sharded. With the sharded layout alone the compiler propagates it
    into the loop and reduces at every iteration; this way it moves the reduction out of the loop and makes it one
    reduce-scatter.
    """

    def one(layout, acc):
      # Travels in the dtype in which each iteration's gradient was computed, as the host's own reductions do.
      wire = acc.astype(layout.compute_dtype)
      if self.residency is not Residency.ITERATION:
        wire = constrain(wire, layout.gathered, self.mesh)
      return constrain(wire, layout.sharded, self.mesh).astype(layout.accumulation_dtype)

    return self._map(one, total)


  def add(self, a: PyTree, b: PyTree) -> PyTree:
    """Sum of two gradients in the same layout."""
    return jax.tree.map(jnp.add, a, b)

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


def _over(mask: jax.Array, x: jax.Array) -> jax.Array:
  """A mask [S] shaped to broadcast against x [S, …]."""
  return mask.reshape(mask.shape + (1,) * (x.ndim - 1))

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Gradients that are one matrix product, as what each device computes of them.

`partial.py` leaves a gradient in parts by giving its root an axis of parts, and the compiler lays all of it out. A gradient
that is nothing but one product can also be written down for one device: the product of the device's own rows. So it can
stand in a branch that some stages take and others do not.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec as P

from maxtext_pp_ext.engine.per_stage import Layout
from maxtext_pp_ext.engine.programs.roots import BatchSplit, Root
from maxtext_pp_ext.jax_private import JaxprEqn


class _Dim(NamedTuple):
  """The dimensions of the operands that a dimension of a product is; None for an operand that does not have it."""

  left: int | None
  right: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Product:
  """A gradient [S, …] that is a product of two arrays.

  Attributes:
    dims: for each dimension of the gradient, where the operands have it. Both have the first one, the stages'.
    contracted: (of the left operand, of the right one, mesh axes that shard them) of each dimension that is summed over.
    dtypes: to which the product is converted, one after another.
    precision, preferred_element_type: as for `jax.lax.dot_general`.
  """

  dims: tuple[_Dim, ...]
  contracted: tuple[tuple[int, int, tuple[str, ...]], ...]
  dtypes: tuple[Any, ...]
  precision: Any
  preferred_element_type: Any

  @classmethod
  def of(cls, roots: Sequence[Root], tail: Sequence[JaxprEqn], splits: Sequence[BatchSplit]) -> Product | None:
    """The product that a gradient is; None for a gradient that is something else.

    Args:
      roots, tail: of the gradient (`roots.Found`).
      splits: the batch axes that the roots are split along, each with more than one part.
    """
    if len(roots) != 1 or roots[0].axes is None or roots[0].eqn.primitive.name != "dot_general":
      return None
    eqn, axes = roots[0].eqn, dict(zip([each for each, _ in roots[0].axes], splits, strict=True))
    dims, contracted = _of_product(eqn)
    dtypes = []
    for each in tail:
      if each.primitive.name == "transpose":
        dims = [dims[k] for k in each.params["permutation"]]
      elif each.primitive.name == "convert_element_type":
        dtypes.append(each.params["new_dtype"])
      else:
        return None
    if not dims or None in dims[0]:
      return None
    return cls(
        dims=tuple(dims),
        contracted=tuple((*pair, axes[pair].axes if pair in axes else ()) for pair in contracted),
        dtypes=tuple(dtypes),
        precision=eqn.params["precision"],
        preferred_element_type=eqn.params["preferred_element_type"],
    )

  def layouts(self, gradient: P) -> tuple[Layout, Layout]:
    """The layouts of the two operands with which devices compute their parts.

    Args:
      gradient: PartitionSpec of the gradient but for its parts, [S, …].
    """
    entries = (*gradient, *(None,) * (len(self.dims) - len(gradient)))
    found = []
    for side in (0, 1):
      of_dims = {dim[side]: entry for dim, entry in zip(self.dims, entries, strict=True) if dim[side] is not None}
      of_dims |= {pair[side]: pair[2] or None for pair in self.contracted}
      found.append(Layout(P(*(of_dims[k] for k in range(len(of_dims)))), self.dims[0][side]))
    return found[0], found[1]

  def on_device(self, left: jax.Array, right: jax.Array) -> jax.Array:
    """A device's part of the gradient of one stage, […], from its arrays, which have no dimension of stages."""
    drop = lambda k, side: k - (k > self.dims[0][side])
    pairs = [(drop(a, 0), drop(b, 1)) for a, b, _ in self.contracted]
    own = [_Dim(*(None if k is None else drop(k, side) for side, k in enumerate(dim))) for dim in self.dims[1:]]
    batch = [dim for dim in own if None not in dim]
    result = jax.lax.dot_general(
        left,
        right,
        (([a for a, _ in pairs], [b for _, b in pairs]), ([dim.left for dim in batch], [dim.right for dim in batch])),
        precision=self.precision,
        preferred_element_type=self.preferred_element_type,
    )
    for dtype in self.dtypes:
      result = result.astype(dtype)
    order = [*batch, *sorted(d for d in own if d.right is None), *sorted(d for d in own if d.left is None)]
    return jax.lax.transpose(result, [order.index(dim) for dim in own])


def _of_product(eqn: JaxprEqn) -> tuple[list[_Dim], list[tuple[int, int]]]:
  """The dimensions of a product's result, and the pairs that it contracts."""
  (left, right), batch = eqn.params["dimension_numbers"]
  shared = [_Dim(a, b) for a, b in zip(*batch, strict=True)]
  free = [
      [k for k in range(len(operand.aval.shape)) if k not in (*contracted, *(dim[side] for dim in shared))]
      for side, (operand, contracted) in enumerate(zip(eqn.invars, (left, right), strict=True))
  ]
  dims = [*shared, *(_Dim(k, None) for k in free[0]), *(_Dim(None, k) for k in free[1])]
  return dims, list(zip(left, right, strict=True))

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""What a device computes of a gradient, written down for that device.

`partial.py` leaves a gradient in parts by giving its root an axis of parts, and the compiler lays all of it out. A
gradient that is nothing but one product can also be written down for one device: the product of the device's own rows.
So it can stand in a branch that some stages take and others do not. A kernel has computed a device's part already.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from maxtext_pp_ext.engine.per_stage import Layout
from maxtext_pp_ext.engine.programs.roots import BatchSplit, Found, Root
from maxtext_pp_ext.jax_private import JaxprEqn

# (dimension of the left operand, of the right one); None if that operand does not have it.
_Dims = tuple[int | None, int | None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Product:
  """Of a gradient [S, …] that is a product of two arrays."""

  stages: tuple[int, int]  # the dimension of the stages, in the left operand and in the right one
  dims: tuple[_Dims, ...]  # for each further dimension of the gradient, where the operands have it
  contracted: tuple[tuple[int, int], ...]  # for each dimension that is summed over, where the operands have it
  sharded: tuple[tuple[str, ...], ...]  # for each of these, the mesh axes that shard it
  dtypes: tuple[Any, ...]  # to which the product is converted, one after another
  precision: Any  # as for `jax.lax.dot_general`
  preferred_element_type: Any

  @classmethod
  def of(cls, root: Root, tail: Sequence[JaxprEqn], splits: Sequence[BatchSplit]) -> Product | None:
    """The product that a gradient is; None for a gradient that is something else.

    Args:
      root, tail: of the gradient (`roots.Found`).
      splits: the batch axes that the root is split along, each with more than one part.
    """
    eqn, over = root.eqn, {pair: split.axes for (pair, _), split in zip(root.axes or (), splits, strict=True)}
    dims, contracted = _of_product(eqn)
    dtypes = []
    for each in tail:
      if each.primitive.name == "transpose":
        dims = [dims[k] for k in each.params["permutation"]]
      elif each.primitive.name == "convert_element_type":
        dtypes.append(each.params["new_dtype"])
      else:
        return None
    left, right = dims[0]
    if left is None or right is None:
      return None
    return cls(
        stages=(left, right),
        dims=tuple(dims[1:]),
        contracted=contracted,
        sharded=tuple(over.get(pair, ()) for pair in contracted),
        dtypes=tuple(dtypes),
        precision=eqn.params["precision"],
        preferred_element_type=eqn.params["preferred_element_type"],
    )

  def layouts(self, gradient: Layout) -> Sequence[Layout]:
    """The layouts of the operands, from that of the gradient [F, S, …]."""
    entries = [*gradient.spec[1:], *[None] * (2 + len(self.dims) - len(gradient.spec))]
    found = []
    for side, stages in enumerate(self.stages):
      spec = {dims[side]: entry for dims, entry in zip(self.dims, entries[1:], strict=True)}
      spec |= {pair[side]: axes or None for pair, axes in zip(self.contracted, self.sharded, strict=True)}
      spec.pop(None, None)
      spec[stages] = entries[0]
      found.append(Layout(P(*(spec[k] for k in range(len(spec)))), stages))
    return found

  def on_device(self, left: jax.Array, right: jax.Array) -> jax.Array:
    """A device's part of the gradient of one stage, [1, …], from its arrays, which have no dimension of stages."""
    without = lambda k, side: k - (k > self.stages[side])
    contracted = [[without(pair[side], side) for pair in self.contracted] for side in (0, 1)]
    shared = [dims for dims in self.dims if None not in dims]
    batch = [[without(dims[side], side) for dims in shared] for side in (0, 1)]
    result = jax.lax.dot_general(
        left,
        right,
        ((contracted[0], contracted[1]), (batch[0], batch[1])),
        precision=self.precision,
        preferred_element_type=self.preferred_element_type,
    )
    for dtype in self.dtypes:
      result = result.astype(dtype)
    of_left = sorted((dims for dims in self.dims if dims[1] is None), key=lambda dims: dims[0] or 0)
    of_right = sorted((dims for dims in self.dims if dims[0] is None), key=lambda dims: dims[1] or 0)
    order = [*shared, *of_left, *of_right]
    return jax.lax.transpose(result, [order.index(dims) for dims in self.dims])[None]


class Computed:
  """Of a gradient of which devices have their parts already: the sum that a shard_map does over devices is its root."""

  def layouts(self, gradient: Layout) -> Sequence[Layout]:
    """The layout of the parts, [F, S, …]."""
    return [gradient]

  def on_device(self, part: jax.Array) -> jax.Array:
    """A device's part of the gradient of one stage, [1, …]."""
    return part


OnDevice = Product | Computed


def on_device(found: Found, splits: Sequence[BatchSplit]) -> OnDevice | None:
  """How a device computes its part of a gradient; None if that is not written down here.

  Args:
    found: the gradient.
    splits: the batch axes that its roots are split along, each with more than one part.
  """
  if len(found.roots) != 1 or found.factors:
    return None
  (root,) = found.roots
  if root.axes is None:
    return None if found.tail else Computed()
  return Product.of(root, found.tail, splits) if root.eqn.primitive.name == "dot_general" else None


def _of_product(eqn: JaxprEqn) -> tuple[list[_Dims], tuple[tuple[int, int], ...]]:
  """The dimensions of a product's result, and those that it sums over."""
  (left, right), (of_left, of_right) = eqn.params["dimension_numbers"]
  free = lambda operand, used: [k for k in range(len(operand.aval.shape)) if k not in used]
  dims: list[_Dims] = list(zip(of_left, of_right, strict=True))
  dims += [(k, None) for k in free(eqn.invars[0], (*left, *of_left))]
  dims += [(None, k) for k in free(eqn.invars[1], (*right, *of_right))]
  return dims, tuple(zip(left, right, strict=True))

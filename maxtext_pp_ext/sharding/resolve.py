# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Logical axes of an NNX variable, the PartitionSpec they resolve to, and what of it a pipeline gathers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from flax import linen as nn
from jax.sharding import Mesh, PartitionSpec as P

# Logical axes along which a weight's shards are themselves the unit of work: each device computes with its own
# experts, so a mesh axis bound to one of these is never gathered, although it may shard the batch elsewhere.
OWNED_LOGICAL_AXES = frozenset({"exp", "exp_with_fsdp"})

LogicalAxes = tuple[str | tuple[str, ...] | None, ...]


def mesh_axes(entry: Any) -> tuple[str, ...]:
  """The mesh axes of one entry of a PartitionSpec."""
  if entry is None or entry is P.UNCONSTRAINED:
    return ()
  return (entry,) if isinstance(entry, str) else tuple(entry)


def logical_axes(variable: Any) -> LogicalAxes | None:
  """The logical axis names that an nnx.Variable carries in its metadata, or None if it has none.

  Flax has kept them under three names over time (`out_sharding`, `sharding_names`, `sharding`); the first one wins.
  """
  metadata = variable.get_metadata()
  for key in ("out_sharding", "sharding_names", "sharding"):
    names = metadata.get(key)
    if names is not None:
      return tuple(getattr(names, "spec", names))
  return None


def resolve(axes: Sequence | None, mesh: Mesh, rules: Sequence | None) -> P:
  """Binds logical axes to mesh axes: rules in order, first match wins, mesh axes of size one removed.

  Args:
    axes: logical names, one per dimension; None for an array without annotation.
    mesh: the device mesh.
    rules: (logical name, mesh axis or axes) pairs.

  Returns:
    A PartitionSpec with one entry per dimension; P() if there is no annotation.
  """
  if axes is None:
    return P()
  spec = nn.logical_to_mesh_axes(tuple(axes), rules=rules)
  return P(*(_collapse(tuple(a for a in mesh_axes(entry) if mesh.shape.get(a, 1) > 1)) for entry in spec or ()))


def gathered_spec(spec: P, axes: Sequence | None, data_axes: Collection[str]) -> P:
  """The layout of a weight when a stage computes with it: sharded as `spec`, less what has to be gathered.

  A mesh axis that shards the activations' batch or sequence cannot stay on a weight's dimension while the stage
  multiplies the two, so it is gathered. It stays where the logical axis is one of `OWNED_LOGICAL_AXES`. The decision
  depends on this weight's logical axes only: not on its name, not on the order of the parameter tree.

  Args:
    spec: resolved PartitionSpec of the weight.
    axes: its logical axes (same length), or None.
    data_axes: mesh axes over which the activations' batch and sequence are sharded.

  Returns:
    `spec` with the gathered mesh axes removed.
  """
  names = tuple(axes) if axes is not None else (None,) * len(spec)
  kept = []
  for entry, name in zip(spec, names, strict=True):
    if name in OWNED_LOGICAL_AXES or entry is P.UNCONSTRAINED:
      kept.append(entry)
    else:
      kept.append(_collapse(tuple(a for a in mesh_axes(entry) if a not in data_axes)))
  return P(*kept)


def gathered_last(spec: P, gathered: P) -> P:
  """`spec` with the mesh axes that `gathered` lacks behind the others of their entry.

  Only then does gathering over them give each device one block of the dimension. Where the order changes, shards change
  places once, which is as many bytes as a device holds.
  """
  entries = []
  for entry, kept in zip(spec, gathered, strict=True):
    axes = mesh_axes(entry)
    entries.append(_collapse(tuple(sorted(axes, key=lambda a: a not in mesh_axes(kept)))))  # pylint: disable=cell-var-from-loop
  return P(*entries)


def _collapse(axes: tuple[str, ...]) -> str | tuple[str, ...] | None:
  return None if not axes else axes[0] if len(axes) == 1 else axes

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Determines the mesh axes over which a pipeline gathers a weight."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from jax.sharding import PartitionSpec as P

from maxtext_pp_ext.sharding.resolve import mesh_axes, spec_entry

# Logical axes along which each device computes with its own shard of a weight, such as its own experts. A mesh axis bound
# to one of these is never gathered, although it may shard the batch elsewhere.
OWNED_LOGICAL_AXES = frozenset({"exp", "exp_with_fsdp"})


def gathered_spec(spec: P, axes: Sequence | None, data_axes: Collection[str]) -> P:
  """The layout of a weight when a stage computes with it: `spec` without the mesh axes that have to be gathered.

  A mesh axis that shards the activations' batch or sequence cannot stay on a weight's dimension while the stage
  multiplies the two, so it is gathered. It stays if the logical axis is one of `OWNED_LOGICAL_AXES`. The decision
  depends on the weight's logical axes only: not on its name, and not on the order of the parameter tree.

  Args:
    spec: resolved PartitionSpec of the weight.
    axes: the weight's logical axes (same length), or None.
    data_axes: mesh axes over which the activations' batch and sequence are sharded.

  Raises:
    ValueError: there are more or fewer logical axes than entries of `spec`.
  """
  names = tuple(axes) if axes is not None else (None,) * len(spec)
  if len(names) != len(spec):
    raise ValueError(
        f"{len(names)} logical axes {names} for the {len(spec)} entries of {spec}: it cannot be told which of them are "
        "meant. Name each dimension, with None for one without a name."
    )

  def kept(entry: Any, name: Any) -> Any:
    if name in OWNED_LOGICAL_AXES or entry is P.UNCONSTRAINED:
      return entry
    return spec_entry(tuple(axis for axis in mesh_axes(entry) if axis not in data_axes))

  return P(*(kept(entry, name) for entry, name in zip(spec, names, strict=True)))


def gathered_last(spec: P, gathered: P) -> P:
  """`spec` with the mesh axes that `gathered` lacks moved to the end of their entry.

  Only in this order does a gather over them give each device one block of the dimension. If the order changes, shards
  are exchanged once; each device then transfers as many bytes as it holds.
  """

  def ordered(entry: Any, kept: Any) -> Any:
    axes, stay = mesh_axes(entry), mesh_axes(kept)
    return spec_entry((*(axis for axis in axes if axis in stay), *(axis for axis in axes if axis not in stay)))

  return P(*(ordered(entry, kept) for entry, kept in zip(spec, gathered, strict=True)))

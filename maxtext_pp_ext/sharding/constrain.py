# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Layouts of arrays within a program: those of weights that a pipeline gathers, and automatic sharding.

The latter is for mesh axes that are explicit, that is, part of array types.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from maxtext_pp_ext.sharding.resolve import divisible, mesh_axes, spec_entry

# Logical axes along which each device computes with its own shard of a weight, such as its own experts. A mesh axis bound
# to one of these is never gathered, although it may shard the batch elsewhere.
OWNED_LOGICAL_AXES = frozenset({"exp", "exp_with_fsdp"})


def divisible_spec(spec: P, shape: tuple[int, ...], mesh: Mesh) -> P:
  """`spec` without the mesh axes that do not divide their dimension; the array is replicated over those.

  The axes of a compound entry are tried in order, and those that fit are kept.
  """
  padded = tuple(spec) + (None,) * (len(shape) - len(spec))
  return P(
      *(
          entry if entry is P.UNCONSTRAINED else spec_entry(divisible(mesh_axes(entry), size, mesh.shape))
          for size, entry in zip(shape, padded, strict=True)
      )
  )


def constrain(x: Any, spec: P, mesh: Mesh) -> Any:
  """Lays `x` out as `spec` over `mesh`."""
  return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, divisible_spec(spec, x.shape, mesh)))


def is_explicit(mesh: Mesh) -> bool:
  """Whether any axis of the mesh is explicit."""
  return AxisType.Explicit in mesh.axis_types


def automatic(mesh: Mesh | AbstractMesh) -> Any:
  """A mesh with the same devices, if it has any, and axis names, for which the compiler chooses shardings."""
  types = (AxisType.Auto,) * len(mesh.axis_names)
  if isinstance(mesh, AbstractMesh):
    return mesh.update(axis_types=types)
  return Mesh(mesh.devices, mesh.axis_names, axis_types=types)


def spec_of(x: jax.Array) -> P:
  """The PartitionSpec in an array's type."""
  return jax.typeof(x).sharding.spec


def run_automatic(fn: Callable, mesh: Mesh, out_specs: Any) -> Callable:
  """`fn`, but traced with `automatic(mesh)`; its results have the PartitionSpecs `out_specs`, a prefix of their tree.

  Returns `fn` itself if the mesh has no explicit axes.
  """
  if not is_explicit(mesh):
    return fn
  return jax.sharding.auto_axes(fn, axes=mesh.axis_names, out_sharding=out_specs)


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

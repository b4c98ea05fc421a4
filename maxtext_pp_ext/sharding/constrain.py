# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Layouts of arrays within a program; automatic sharding where mesh axes are explicit, that is, part of array types."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from maxtext_pp_ext.sharding.resolve import divisible, mesh_axes, spec_entry


def divisible_spec(spec: P, shape: tuple[int, ...], mesh: Mesh) -> P:
  """`spec` without the mesh axes that do not divide their dimension; the array is replicated over those.

  The axes of a compound entry are tried in order, and those that fit are kept.
  """
  return P(
      *(
          entry if entry is P.UNCONSTRAINED else spec_entry(divisible(mesh_axes(entry), size, mesh.shape))
          for size, entry in zip(shape, tuple(spec) + (None,) * (len(shape) - len(spec)), strict=True)
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

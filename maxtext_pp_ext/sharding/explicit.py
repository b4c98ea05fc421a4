# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Automatic sharding within a program with explicit mesh axes, whose arrays carry their shardings in their types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

PyTree = Any


def is_explicit(mesh: Mesh) -> bool:
  """Whether any axis of the mesh is explicit, that is, part of array types."""
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


def run_automatic(fn: Callable, mesh: Mesh, out_specs: PyTree) -> Callable:
  """`fn`, but traced with `automatic(mesh)`; its results have the PartitionSpecs `out_specs`, a prefix of their tree.

  Returns `fn` itself if the mesh has no explicit axes.
  """
  if not is_explicit(mesh):
    return fn
  return jax.sharding.auto_axes(fn, axes=mesh.axis_names, out_sharding=out_specs)

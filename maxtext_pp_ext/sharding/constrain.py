# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Puts an array into a layout."""

from __future__ import annotations

import math
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from maxtext_pp_ext.sharding.resolve import mesh_axes


def divisible_spec(spec: P, shape: tuple[int, ...], mesh: Mesh) -> P:
  """`spec` without the mesh axes that do not divide their dimension; the array is replicated over those.

  Mesh axes of a compound entry are dropped from the right until the rest divides.
  """
  entries = []
  for size, entry in zip(shape, tuple(spec) + (None,) * (len(shape) - len(spec)), strict=True):
    if entry is P.UNCONSTRAINED:
      entries.append(entry)
      continue
    axes = mesh_axes(entry)
    while axes and size % math.prod(mesh.shape[a] for a in axes):
      axes = axes[:-1]
    entries.append(None if not axes else axes[0] if len(axes) == 1 else axes)
  return P(*entries)


def constrain(x: Any, spec: P, mesh: Mesh) -> Any:
  """Lays `x` out as `spec` over `mesh`."""
  return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, divisible_spec(spec, x.shape, mesh)))

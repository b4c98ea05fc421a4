# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Puts an array into a layout."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from maxtext_pp_ext.sharding.resolve import divisible, mesh_axes, spec_entry


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

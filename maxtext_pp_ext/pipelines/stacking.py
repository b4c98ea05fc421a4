# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""How the arrays of stacked layers are stacked, and how they become `[repeat, stage, …]`."""

import dataclasses
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from maxtext_pp_ext.sharding import logical_axes
from maxtext_pp_ext.sharding.resolve import LogicalAxes


@dataclasses.dataclass(frozen=True)
class OfPipeline:
  """MaxText's stacking of pipeline stages: [repeat, stage, …], or [stage, …] with one repeat."""

  repeats: int

  def leading(self, variable: nnx.Variable, x: jax.Array) -> jax.Array:
    """[R, S, …], from an array of a variable of the stacked layers."""
    del variable
    return x if self.repeats > 1 else x[None]

  def names(self, variable: nnx.Variable) -> LogicalAxes | None:
    """The logical axes of `leading`, those of repeats and stages included; None if the variable has none."""
    names = logical_axes(variable)
    return names if names is None or self.repeats > 1 else ("circular_repeats", *names)

  def stored(self, x: jax.Array) -> jax.Array:
    """A value of the layers that is no parameter, from [R, S, …]."""
    return x if self.repeats > 1 else x[0]

  def axis_of_parameters(self, config: Any) -> int:
    """The axis along which a layer's parameters are stacked in a repeat of a stage, or over repeats."""
    scanned = config.scan_layers_per_stage and config.num_layers_per_pipeline_stage > 1
    return config.param_scan_axis if scanned else 0


@dataclasses.dataclass(frozen=True)
class OfScan:
  """MaxText's stacking of layers without a pipeline: parameters along `axis`, other arrays along the first axis.

  Its methods are those of `OfPipeline`.
  """

  length: int  # the number of layers, or of blocks of layers; they are the repeats of the only stage
  axis: int  # `param_scan_axis`. A parameter that has no such axis is stacked along its first.

  def leading(self, variable: nnx.Variable, x: jax.Array) -> jax.Array:
    if x.ndim == 0:
      x = jnp.broadcast_to(x, (self.length,))
    axis = self.axis if isinstance(variable, nnx.Param) and x.ndim > self.axis else 0
    return jnp.moveaxis(x, axis, 0)[:, None]

  def names(self, variable: nnx.Variable) -> LogicalAxes | None:
    names = logical_axes(variable)
    if names is None:
      return None
    within, scanned = list(names), variable.get_metadata().get(nnx.PARTITION_NAME)
    if scanned in within:
      within.remove(scanned)
    return ("circular_repeats", "layers", *within)

  def stored(self, x: jax.Array) -> jax.Array:
    return x[:, 0]

  def axis_of_parameters(self, config: Any) -> int:
    del config
    return self.axis


Stacking = OfPipeline | OfScan

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""What a train step takes on each device, by the formulas of docs/how-it-works.md; nothing is compiled.

S stages, M microbatches, R repeats, T iterations; n weights of one repeat of one stage, A bytes of one microbatch's
activations on a device.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from jax.sharding import AbstractMesh
import jax.numpy as jnp

from maxtext_pp_ext import sharding
from maxtext_pp_ext.engine.residency import Residency
from maxtext_pp_ext.host import factory
from maxtext_pp_ext.pipelines import base
from maxtext_pp_ext.schedule import CircularSchedule
from maxtext_pp_ext.sharding.gathered import gathered_spec
from maxtext_pp_ext.sharding.resolve import mesh_axes, resolve

_IN_PIPELINE = "decoder/pipeline_module/"
_ALWAYS_MISSING = (
    "what a stage needs to compute one microbatch, forward and backward",
    "the logits, and other activations outside the pipeline",
)


@dataclasses.dataclass(frozen=True)
class Estimate:
  """Bytes of a device, and in words what is not among them."""

  parts: dict[str, int]
  missing: tuple[str, ...]

  @property
  def total(self) -> int:
    return sum(self.parts.values())


def estimate(config: Any, schedule: CircularSchedule | None, parameters: sharding.Explanation, mesh: Any) -> Estimate:
  """Bytes of a device.

  Args:
    config: MaxText's config.
    schedule: of its pipeline; None without one.
    parameters: how its parameters are sharded.
    mesh: its mesh.
  """
  own = parameters.totals["bytes_per_device"]
  parts, missing = {"parameters": own}, []
  if getattr(config.opt_type, "value", config.opt_type) in ("adamw", "adam_pax"):
    first = jnp.dtype(config.mu_dtype) if config.mu_dtype else None
    moments = [
        row.bytes_per_device * ((first.itemsize / row.layout.dtype.itemsize) if first else 1) for row in parameters.rows
    ]
    parts["optimizer's moments"] = round(sum(moments)) + own
  else:
    missing.append(f"the optimizer's state (opt_type={getattr(config.opt_type, 'value', config.opt_type)})")
  parts["gradients, sharded"] = own
  cls = factory.pipeline_class(config) if schedule is not None else None
  residency = getattr(cls, "residency", None)
  if residency is None:
    whose = "a model without a pipeline" if schedule is None else f"pipeline_impl={factory.pipeline_impl(config)}"
    missing.append(f"gathered weights and activations: there are no formulas for {whose}")
  else:
    parts |= _of_pipeline(config, schedule, parameters, mesh, residency)
    if config.remat_policy != "full":
      missing.append(f"what remat_policy={config.remat_policy} keeps beside the stages' inputs")
  return Estimate(parts, (*missing, *_ALWAYS_MISSING))


def _of_pipeline(
    config: Any, schedule: CircularSchedule, parameters: sharding.Explanation, mesh: AbstractMesh, residency: Residency
) -> dict[str, int]:
  gathered, summed = _gathered_bytes(config, schedule, parameters, mesh)
  activations = _activation_bytes(config, schedule, mesh)
  parts = {}
  if residency is Residency.REPEAT:
    parts["weight window: slot and spare"] = 2 * gathered
  elif residency is Residency.ONCE:
    parts["gathered weights of all repeats"] = schedule.repeats * gathered
  else:
    parts["gathered weights of one iteration"] = gathered
  if residency is not Residency.ITERATION:
    parts["sums of the gradients of a repeat"] = summed
  parts["stages' inputs, kept for backward"] = schedule.iterations * activations
  parts["waiting microbatches, both directions"] = 2 * schedule.microbatches * activations
  return parts


def _gathered_bytes(
    config: Any, schedule: CircularSchedule, parameters: sharding.Explanation, mesh: AbstractMesh
) -> tuple[int, int]:
  """Of n: as they are gathered, and in the dtype in which gradients are summed."""
  rules, sizes = config.logical_axis_rules, dict(mesh.shape)
  data_axes = base.data_mesh_axes(mesh, rules)
  gathered = summed = 0.0
  for row in parameters.rows:
    layout = row.layout
    if not layout.path.startswith(_IN_PIPELINE):
      continue
    spec, names = layout.sharding.spec, layout.resolution.names if layout.resolution else None
    kept = gathered_spec(spec, names, data_axes) if names is not None and len(names) == len(spec) else spec
    shards = math.prod(sizes[axis] for entry in kept for axis in mesh_axes(entry) if axis != "stage")
    count = math.prod(layout.shape) / (schedule.repeats * schedule.stages) / shards
    own = layout.dtype.itemsize
    narrow = own if config.pipeline_gather_dtype == "weight" else min(own, jnp.dtype(config.dtype).itemsize)
    gathered += count * narrow
    accumulates = config.pipeline_grad_accum_dtype
    summed += count * (own if accumulates == "auto" else jnp.dtype(accumulates).itemsize)
  return round(gathered), round(summed)


def _activation_bytes(config: Any, schedule: CircularSchedule, mesh: AbstractMesh) -> int:
  spec = resolve(base.ACTIVATION_AXES, mesh, config.logical_axis_rules)
  sizes = dict(mesh.shape)
  shards = math.prod(sizes[axis] for entry in spec for axis in mesh_axes(entry) if axis != "stage")
  rows = config.micro_batch_size_to_train_on // schedule.microbatches
  return math.ceil(rows * config.max_target_length * config.emb_dim * jnp.dtype(config.dtype).itemsize / shards)

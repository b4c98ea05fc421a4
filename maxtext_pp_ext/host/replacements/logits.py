# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Logits of a model whose stages are on different slices: their weight's gradient is added up beside backward.

Outside of the pipeline MaxText divides the batch over the stages. By itself, XLA adds up the stages' gradients behind
backward, where nothing hides it. Here the pipeline gives each stage a copy of the weight. Backward adds up the copies'
gradients (`engine/outside.py`).
"""

from collections.abc import Callable
import inspect
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from maxtext_pp_ext.config.derived import adds_up_logits
from maxtext_pp_ext.engine import Outside
from maxtext_pp_ext.engine.ring import STAGE_AXIS
from maxtext_pp_ext.host.models.axes import LOGITS_AXES
from maxtext_pp_ext.pipelines.head import current, Head
from maxtext_pp_ext.sharding import constrain, divisible_spec, is_explicit
from maxtext_pp_ext.sharding.resolve import mesh_axes, resolve


def call(own: Callable, decoder: Any, *args: Any, **kwargs: Any) -> Any:
  """`NNXDecoder.__call__`; while it runs, `current` is its head, if its pipeline is one of ours over slices."""
  # bind_partial: a missing argument is MaxText's own error.
  tokens = inspect.signature(own).bind_partial(decoder, *args, **kwargs).arguments.get("decoder_input_tokens")
  token = current.set(_head(decoder, len(tokens)) if tokens is not None and adds_up_logits(decoder.config) else None)
  try:
    return own(decoder, *args, **kwargs)
  finally:
    current.reset(token)


def apply_output_head(own: Callable, decoder: Any, *args: Any, **kwargs: Any) -> jax.Array:
  """`NNXDecoder.apply_output_head`; behind a pipeline that has returned copies, each stage's rows with its own copy."""
  head = current.get()
  if head is None or head.copies is None:
    return own(decoder, *args, **kwargs)
  dense, copies = decoder.logits_dense, head.copies

  def logits(y: jax.Array, out_sharding: Any = None) -> jax.Array:
    del out_sharding  # which only a model with explicit sharding has
    return _product(dense, decoder, jnp.asarray(y, dense.dtype), copies)

  # Past the module's own `__setattr__`, for which this would be another model.
  vars(decoder)["logits_dense"] = logits
  try:
    return own(decoder, *args, **kwargs)
  finally:
    vars(decoder)["logits_dense"] = dense


def _head(decoder: Any, batch: int) -> Head | None:
  """The head of a decoder that runs on so many rows; None if its logits are left to MaxText."""
  from maxtext_pp_ext.pipelines.base import CircularPipelineBase  # pylint: disable=import-outside-toplevel

  # A class with a call of its own may transform ours, out of which no copies could come.
  if type(decoder.pipeline_module).__call__ is not CircularPipelineBase.__call__ or decoder.model_mode != "train":
    return None
  dense, mesh, rules = decoder.logits_dense, decoder.mesh, decoder.config.logical_axis_rules
  kernel, others = dense.kernel.get_value(), (dense.quant, dense.bias, dense.kernel_scale)
  if any(each is not None for each in others) or kernel.dtype.itemsize == 1 or is_explicit(mesh):
    return None
  spec = divisible_spec(P(*resolve(dense.kernel_axes, mesh, rules)), kernel.shape, mesh)
  rows = _rows(decoder)
  shared = STAGE_AXIS in rows and all(STAGE_AXIS not in mesh_axes(entry) for entry in spec)
  if not shared or batch % math.prod(mesh.shape[axis] for axis in rows):
    return None
  return Head(Outside(jnp.asarray(kernel, dense.dtype), spec))


def _product(dense: Any, decoder: Any, y: jax.Array, copies: jax.Array) -> jax.Array:
  """[batch, sequence, embed], [stage, embed, vocab] -> [batch, sequence, vocab]."""
  rows, mesh = _rows(decoder), decoder.mesh
  before = rows[: rows.index(STAGE_AXIS)]
  sizes = math.prod(mesh.shape[axis] for axis in before), mesh.shape[STAGE_AXIS]
  # A stage's rows stay where the pipeline leaves them. Other layouts of rows make XLA gather all of them.
  spec = P(before or None, STAGE_AXIS, *[P.UNCONSTRAINED] * 3)
  y = constrain(y.reshape(*sizes, -1, *y.shape[1:]), spec, mesh)
  precision = jax.lax.Precision(dense.matmul_precision)
  found = jnp.einsum("dsble,sev->dsblv", y, copies, precision=precision)
  return found.reshape(-1, *found.shape[3:])


def _rows(decoder: Any) -> tuple[str, ...]:
  """The mesh axes that divide the batch outside of the pipeline."""
  return mesh_axes(resolve(LOGITS_AXES[:1], decoder.mesh, decoder.config.logical_axis_rules)[0])

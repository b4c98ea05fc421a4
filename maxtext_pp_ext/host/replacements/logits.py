# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Logits of a model whose stages are on different slices: their weight's gradient is added up beside backward.

Outside of the pipeline MaxText divides the batch over the stages. By itself, XLA adds up the stages' gradients behind
backward, where nothing hides it. Here the pipeline gives each stage a copy of the weight. Backward adds up the copies'
gradients (`engine/outside.py`).
"""

from collections.abc import Callable, Iterator
import contextlib
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from maxtext_pp_ext import registry
from maxtext_pp_ext.config.derived import pipeline_impl
from maxtext_pp_ext.config.view import plain
from maxtext_pp_ext.host.models.axes import LOGITS_AXES
from maxtext_pp_ext.pipelines.head import current, Head
from maxtext_pp_ext.sharding import constrain
from maxtext_pp_ext.sharding.resolve import mesh_axes, resolve

_STAGE = "stage"


@contextlib.contextmanager
def of(decoder: Any, tokens: jax.Array | None) -> Iterator[None]:
  """While a decoder runs on tokens [batch, …], `current` is its head, if its pipeline is one of ours over slices."""
  token = current.set(_head(decoder, tokens.shape[0]) if tokens is not None and over_slices(decoder.config) else None)
  try:
    yield
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
    return _product(decoder, jnp.asarray(y, dense.dtype), copies)

  # Past the module's own `__setattr__`, for which this would be another model.
  vars(decoder)["logits_dense"] = logits
  try:
    return own(decoder, *args, **kwargs)
  finally:
    vars(decoder)["logits_dense"] = dense


def over_slices(config: Any) -> bool:
  """Whether a run has a pipeline of ours over slices."""
  ours = getattr(config, "using_pipeline_parallelism", False) and pipeline_impl(config) != registry.HOST
  return ours and config.dcn_pipeline_parallelism > 1


def _head(decoder: Any, batch: int) -> Head | None:
  """The head of a decoder that runs on so many rows; None if its logits are left to MaxText."""
  config, dense = decoder.config, getattr(decoder, "logits_dense", None)
  if dense is None or config.num_vocab_tiling > 1 or plain(config.shard_mode) != "auto" or decoder.model_mode != "train":
    return None
  # Other products than of two plain matrices.
  kernel, others = dense.kernel.get_value(), (dense.quant, dense.bias, dense.kernel_scale)
  if any(each is not None for each in others) or dense.parameter_memory_host_offload or kernel.dtype.itemsize == 1:
    return None
  of_weight = {axis for entry in resolve(dense.kernel_axes, decoder.mesh, _rules(decoder)) for axis in mesh_axes(entry)}
  rows = _rows(decoder)
  if _STAGE not in rows or _STAGE in of_weight or batch % math.prod(decoder.mesh.shape[axis] for axis in rows):
    return None
  return Head(jnp.asarray(kernel, dense.dtype), tuple(dense.kernel_axes))


def _product(decoder: Any, y: jax.Array, copies: jax.Array) -> jax.Array:
  """[batch, sequence, embed], [stage, embed, vocab] -> [batch, sequence, vocab]."""
  rows, mesh = _rows(decoder), decoder.mesh
  before, behind = rows[: rows.index(_STAGE)], rows[rows.index(_STAGE) + 1 :]
  sizes = math.prod(mesh.shape[axis] for axis in before), mesh.shape[_STAGE]
  y = constrain(y.reshape(*sizes, -1, *y.shape[1:]), P(before or None, _STAGE, behind or None), mesh)
  found = jnp.einsum("dsble,sev->dsblv", y, copies, precision=jax.lax.Precision(decoder.config.matmul_precision))
  return found.reshape(-1, *found.shape[3:])


def _rows(decoder: Any) -> tuple[str, ...]:
  """The mesh axes that divide the batch outside of the pipeline."""
  return mesh_axes(resolve(LOGITS_AXES[:1], decoder.mesh, _rules(decoder))[0])


def _rules(decoder: Any) -> Any:
  return decoder.config.logical_axis_rules

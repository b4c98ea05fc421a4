# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs the layers that MaxText scans over with one of our implementations, in a model without a pipeline.

`NNXDecoder._apply_layers_sequentially` is where MaxText scans over a stack of layers: all layers of most models,
DeepSeek's dense layers and its MoE layers, the blocks of models whose layers come in cycles. The layers keep their
parameters and their initial values, so checkpoints are those of MaxText. What is not in such a stack runs as without us.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
import inspect
from typing import Any

import jax

from maxtext_pp_ext import registry
from maxtext_pp_ext.config.derived import pipeline_impl, windowed
from maxtext_pp_ext.errors import UnsupportedError
from maxtext_pp_ext.host.replacements import factory

# Arguments of the scan that do not change what a layer computes.
_OF_THE_SCAN = ("unroll", "metadata_axis_name", "skip_block_remat")


def apply(
    host_scan: Callable,
    decoder: Any,
    layers: Any,
    inputs: jax.Array,
    args: tuple,
    length: int,
    kwargs: Mapping[str, Any],
) -> tuple[jax.Array, Any, Any]:
  """`NNXDecoder._apply_layers_sequentially`, in our implementation if the config names one and the model is trained.

  Args:
    host_scan: MaxText's own.
    decoder: the decoder.
    layers: the stacked layers.
    inputs: activations [batch, sequence, embed].
    args: the layers' other positional arguments: segment ids, positions, deterministic, model mode.
    length: the number of stacked layers.
    kwargs: arguments of the scan and keyword arguments of the layers.

  Returns:
    (activations, the layers, None).

  Raises:
    NotImplementedError: the layers take arrays that cannot be divided into microbatches, or the implementation runs
      pipelines only.
  """
  config = decoder.config
  segment_ids, positions, deterministic, model_mode = args
  # MaxText's first call of a quantized model makes state, which is to be MaxText's own.
  makes_state = getattr(decoder, "disable_quant_stats_update", False)
  trains = model_mode == decoder.model_mode == "train"
  if not windowed(config) or not trains or makes_state or not length:
    return host_scan(decoder, layers, inputs, *args, length=length, **kwargs)
  name = pipeline_impl(config)
  given = {key: value for key, value in kwargs.items() if key not in _OF_THE_SCAN}
  if refused := [key for key, value in given.items() if value is not None]:
    raise UnsupportedError(
        f"pipeline_impl={name} without a pipeline: the layers cannot be given {', '.join(refused)}. Call the model "
        "without it, or set pipeline_impl=host."
    )
  cls = registry.get(name).load()
  if not hasattr(cls, "run_scanned"):
    raise UnsupportedError(
        f"pipeline_impl={name} runs pipelines only: {cls.__name__} has no method run_scanned. Set "
        "ici_pipeline_parallelism, or pipeline_impl=host."
    )
  factory.announce_window(config, length)
  takes = inspect.signature(type(layers).__call__).parameters
  layer_kwargs = {key: value for key, value in given.items() if key in takes or "kwargs" in takes}
  call = lambda layer, x, segment_ids, positions: layer(
      x, segment_ids, positions, deterministic, model_mode, **layer_kwargs
  )
  outputs = cls.run_scanned(
      layers,
      inputs,
      segment_ids,
      positions,
      config=config,
      mesh=decoder.mesh,
      length=length,
      call=call,
      policy=decoder.get_remat_policy(),
      recomputes=not kwargs.get("skip_block_remat", False),
  )
  return outputs, layers, None

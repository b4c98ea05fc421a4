# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs the layers that MaxText scans over with one of our implementations, in a model without a pipeline.

`NNXDecoder._apply_layers_sequentially` is where MaxText scans over a stack of layers: all layers of most models,
DeepSeek's dense layers and its MoE layers, the blocks of models whose layers come in cycles. The layers keep their
parameters and their initial values, so checkpoints are those of MaxText.
"""

from collections.abc import Callable, Mapping
import inspect
import math
from typing import Any

import jax

from maxtext_pp_ext import registry
from maxtext_pp_ext.config.derived import decoder_block, microbatches_of_window, pipeline_impl, windowed
from maxtext_pp_ext.config.host_keys import HostKeys
from maxtext_pp_ext.errors import UnsupportedError
from maxtext_pp_ext.host.replacements import factory
from maxtext_pp_ext.units import counted

# Arguments of the scan that do not change what a layer computes.
_OF_THE_SCAN = ("unroll", "metadata_axis_name", "skip_block_remat")
# Block -> arrays that MaxText gives its layers and those in its scan do not read. DeepSeek V4's layers that choose
# experts by the hash of a token come before the scan.
_UNREAD = {"deepseek4": ("decoder_input_tokens",)}


def apply(
    own: Callable, decoder: Any, layers: Any, inputs: jax.Array, *args: Any, length: int, **kwargs: Any
) -> tuple[jax.Array, Any, Any]:
  """`NNXDecoder._apply_layers_sequentially`, in our implementation if the config names one and the model is trained.

  `layers` are the `length` stacked layers, and `inputs` activations [batch, sequence, embed], or with hyper-connections
  [batch, sequence, streams, embed]. The layers' other positional arguments are segment ids, positions, deterministic and
  model mode. `kwargs` has arguments of the scan and of the layers. Returns (activations, the layers, None). Raises
  NotImplementedError if the layers take arrays that cannot be divided into microbatches, or the implementation runs
  pipelines only.
  """
  config = decoder.config
  segment_ids, positions, deterministic, model_mode = args
  # MaxText's first call of a quantized model makes state, which is to be MaxText's own.
  makes_state = getattr(decoder, "disable_quant_stats_update", False)
  trains = model_mode == decoder.model_mode == "train"
  if not windowed(config) or not trains or makes_state or not length:
    return own(decoder, layers, inputs, *args, length=length, **kwargs)
  contract = registry.get(pipeline_impl(config)).contract
  if contract.run_scanned is None:
    raise UnsupportedError(
        f"pipeline_impl={pipeline_impl(config)} runs pipelines only: {contract.module_class.__name__} has no method "
        "run_scanned. Set ici_pipeline_parallelism, or pipeline_impl=host."
    )
  layer_kwargs = _layer_kwargs(config, layers, kwargs)
  factory.log_once(
      f"maxtext_pp_ext: pipeline_impl={pipeline_impl(config)} is active without a pipeline: {length} scanned layers, "
      f"{counted(microbatches_of_window(config), 'microbatch')}"
  )
  # The engine's activations have three axes. Those with hyper-connections have one more, of streams.
  features = inputs.shape[2:]

  def call(layer, x, segment_ids, positions):
    x = x.reshape(*x.shape[:2], *features)
    outputs = layer(x, segment_ids, positions, deterministic, model_mode, **layer_kwargs)
    return _joined(outputs[0] if isinstance(outputs, tuple) else outputs)

  outputs = contract.run_scanned(
      layers,
      _joined(inputs),
      segment_ids,
      positions,
      config=config,
      mesh=decoder.mesh,
      length=length,
      call=call,
      policy=decoder.get_remat_policy(),
      recomputes=not kwargs.get("skip_block_remat", False),
  )
  return outputs.reshape(inputs.shape), layers, None


def _joined(x: jax.Array) -> jax.Array:
  return x.reshape(*x.shape[:2], math.prod(x.shape[2:]))


def _layer_kwargs(config: HostKeys, layers: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the keyword arguments of a layer. Raises NotImplementedError if one cannot be divided into microbatches."""
  without = {*_OF_THE_SCAN, *_UNREAD.get(decoder_block(config), ())}
  given = {key: value for key, value in kwargs.items() if key not in without}
  if refused := [key for key, value in given.items() if value is not None]:
    raise UnsupportedError(
        f"pipeline_impl={pipeline_impl(config)} without a pipeline: the layers cannot be given {', '.join(refused)}. "
        "Call the model without it, or set pipeline_impl=host."
    )
  takes = inspect.signature(type(layers).__call__).parameters
  return {key: value for key, value in given.items() if key in takes or "kwargs" in takes}

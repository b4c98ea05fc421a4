# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Refuses arguments of the decoder that its pipelined path would drop: it passes on five arguments, no others."""

from collections.abc import Callable, Mapping
import inspect
from typing import Any

from maxtext_pp_ext import registry
from maxtext_pp_ext.config.derived import decoder_block, pipeline_impl, windowed
from maxtext_pp_ext.config.host_keys import HostKeys
from maxtext_pp_ext.errors import UnsupportedError

# Argument of `NNXDecoder.__call__` -> what it carries. MaxText itself refuses forced_routed_experts with a pipeline.
_LOST = {
    "previous_chunk": "the previous chunk of a chunked prefill",
    "slot": "the slot of a request in the decode batch",
    "kv_caches": "external key-value caches",
    "attention_metadata": "external attention metadata",
    "deepstack_visual_embeds": "visual features to be added after the first layers",
}
_BIDIRECTIONAL_BLOCKS = ("gemma3", "gemma4")  # the only ones whose layers MaxText gives the mask


def call(own: Callable, decoder: Any, *args: Any, **kwargs: Any) -> Any:
  """`NNXDecoder.__call__`, unless it would lose an argument."""
  # bind_partial: a missing argument is MaxText's own error.
  refuse_lost_arguments(decoder.config, inspect.signature(own).bind_partial(decoder, *args, **kwargs).arguments)
  return own(decoder, *args, **kwargs)


def check(config: HostKeys, **arguments: Any) -> None:
  """`refuse_lost_arguments` of a patched MaxText, which would silently run layers without a pipeline itself."""
  if windowed(config):
    raise UnsupportedError(
        f"pipeline_impl={pipeline_impl(config)} without a pipeline: this MaxText is patched with patch points that have "
        "pipelines only. Install MaxText without patches/, or set pipeline_impl=host."
    )
  refuse_lost_arguments(config, arguments)


def refuse_lost_arguments(config: HostKeys, arguments: Mapping[str, Any]) -> None:
  """Raises NotImplementedError if an implementation of ours would not get an argument that matters."""
  if (name := pipeline_impl(config)) == registry.HOST or not getattr(config, "using_pipeline_parallelism", False):
    return
  lost = [f"{key} ({what})" for key, what in _LOST.items() if arguments.get(key) is not None]
  images, positions = arguments.get("multimodal_input"), arguments.get("decoder_positions")
  if images is not None and decoder_block(config) in _BIDIRECTIONAL_BLOCKS:
    if images.bidirectional_mask is not None or images.bidirectional_mask_video is not None:
      lost.append("multimodal_input.bidirectional_mask (which tokens attend in both directions)")
  if config.engram_layers:
    lost.append("decoder_input_tokens (engram_layers needs them in every layer)")
  if positions is not None and getattr(positions, "ndim", 2) != 2:
    lost.append(f"axes of decoder_positions (shape {positions.shape}, expected [batch, sequence])")
  if lost:
    raise UnsupportedError(
        f"pipeline_impl={name}: MaxText's pipelined decoder would silently drop {', '.join(lost)}. Call the model "
        "without it, or without a pipeline (ici_pipeline_parallelism=1, dcn_pipeline_parallelism=1, pipeline_impl=host)."
    )

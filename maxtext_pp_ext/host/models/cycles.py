# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Decoder blocks whose layers differ by index, in cycles.

Without a pipeline and with `scan_layers`, MaxText scans over blocks of one cycle. Its pipelined path would count such a
block as one layer, and build a deeper model. Here a stage of `num_layers_per_pipeline_stage` layers has fewer blocks.
"""

import functools
from typing import Any

from maxtext_pp_ext.config.derived import decoder_block
from maxtext_pp_ext.config.host_keys import HostKeys

# Scanned in blocks of inhomogeneous_layer_cycle_interval layers.
CONFIGURED = frozenset({"gpt_oss", "olmo3", "qwen3_next", "qwen3_5", "llama4", "envy"})
GEMMA3_PERIOD = 6  # five layers with local attention, then one with global attention
# Scanned in blocks of a fixed size, of which only Gemma 3's can be pipelined. Block -> (layers in one, the key that
# counts the single layers before the scan). DeepSeek V4's first layers choose experts by the hash of a token; its others
# alternate in how they compress keys.
FIXED = {"gemma3": (GEMMA3_PERIOD, ""), "gemma4": (6, ""), "deepseek4": (2, "first_num_hash_layers")}
# Block -> how many layers one of its decoder layers has: with local attention, then with global attention.
_IN_ONE = {"gemma2": 2}
# Block -> the keys whose values the path without a pipeline passes to a block of one cycle.
_TOLD = {"llama4": ("nope_layer_interval", "interleave_moe_layer_step"), "envy": ("interleave_moe_layer_step",)}


def length(config: HostKeys) -> int:
  """Returns the number of layers in a block that MaxText scans over as one layer."""
  block = decoder_block(config)
  if not config.scan_layers:
    return 1
  if block == "gemma3":  # fewer layers than a period are all alike, and form no block
    return GEMMA3_PERIOD if (config.num_decoder_layers or 0) >= GEMMA3_PERIOD else 1
  return config.inhomogeneous_layer_cycle_interval if block in CONFIGURED else 1


def scanned(config: HostKeys) -> tuple[int, int]:
  """(blocks that MaxText scans over without a pipeline, layers of a block), without layers before or after these."""
  block, layers = decoder_block(config), config.num_decoder_layers or 0
  in_block, outside = FIXED[block] if block in FIXED and config.scan_layers else (max(length(config), 1), "")
  return max(layers - (getattr(config, outside, 0) if outside else 0), 0) // in_block, in_block


def layers(config: HostKeys) -> int:
  """Returns how many layers with attention and an MLP a model has; `num_decoder_layers` may count several as one."""
  return (config.num_decoder_layers or 0) * _IN_ONE.get(decoder_block(config), 1)


def block_class(config: HostKeys, layer_class: type) -> type:
  """Returns the class of a block of one cycle, given the class that the pipelined path takes for a layer's."""
  if (block := decoder_block(config)) == "gemma3" and length(config) > 1:
    from maxtext.models import gemma3  # pylint: disable=import-outside-toplevel

    return _told(gemma3.Gemma3ScannableBlock, (("num_of_layers", GEMMA3_PERIOD),))
  if config.scan_layers and block in _TOLD:
    return _told(layer_class, tuple((key, getattr(config, key)) for key in _TOLD[block]))
  return layer_class


@functools.cache
def _told(cls: type, arguments: tuple[tuple[str, Any], ...]) -> type:
  """Returns a subclass that is always made with these arguments; one class for equal arguments, so models are equal."""

  def __init__(self, *args, **kwargs):
    cls.__init__(self, *args, **kwargs, **dict(arguments))  # type: ignore[misc]  # of the class, not of an instance

  return subclass(cls, __init__=__init__)


def subclass(base: type, *before: type, **attributes: Any) -> type:
  """A subclass that keeps its base's name, as pickle and messages show it; `before` are bases that come first."""
  names = {key: getattr(base, key) for key in ("__module__", "__qualname__", "__doc__")}
  return type(base)(base.__name__, (*before, base), names | attributes)

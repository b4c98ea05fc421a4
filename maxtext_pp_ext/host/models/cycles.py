# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Decoder blocks whose layers differ by index, in cycles.

Without a pipeline and with `scan_layers`, MaxText scans over blocks of one cycle. Its pipelined path counts layers of
the config, takes such a block for one of them, and so would build a deeper model. Here a stage of
`num_layers_per_pipeline_stage` layers is made of whole cycles, and so of fewer blocks.
"""

from __future__ import annotations

import functools
from typing import Any

from maxtext_pp_ext.config.derived import decoder_block
from maxtext_pp_ext.config.host_keys import HostKeys

# Scanned in blocks of inhomogeneous_layer_cycle_interval layers.
CONFIGURED = frozenset({"gpt_oss", "olmo3", "qwen3_next", "qwen3_5", "llama4", "envy"})
GEMMA3_PERIOD = 6  # five layers with local attention, then one with global attention
# What the path without a pipeline tells a block of a cycle, by keys of the config.
_TOLD = {"llama4": ("nope_layer_interval", "interleave_moe_layer_step"), "envy": ("interleave_moe_layer_step",)}


def length(config: HostKeys) -> int:
  """How many layers there are in what MaxText scans over as one layer."""
  block = decoder_block(config)
  if not config.scan_layers:
    return 1
  if block == "gemma3":  # fewer layers than a period are all alike, and no block
    return GEMMA3_PERIOD if (config.num_decoder_layers or 0) >= GEMMA3_PERIOD else 1
  return config.inhomogeneous_layer_cycle_interval if block in CONFIGURED else 1


def block_class(config: HostKeys, layer_class: type) -> type:
  """The class of a block of one cycle, made of what the pipelined path takes for the class of a layer."""
  block = decoder_block(config)
  if block == "gemma3" and length(config) > 1:
    from maxtext.models import gemma3  # pylint: disable=import-outside-toplevel

    return _told(gemma3.Gemma3ScannableBlock, (("num_of_layers", GEMMA3_PERIOD),))
  if config.scan_layers and block in _TOLD:
    return _told(layer_class, tuple((key, getattr(config, key)) for key in _TOLD[block]))
  return layer_class


@functools.cache
def _told(cls: type, arguments: tuple[tuple[str, Any], ...]) -> type:
  """A block that is always made with these arguments. One class for equal ones, since equal models have equal classes."""

  def __init__(self, *args, **kwargs):
    cls.__init__(self, *args, **kwargs, **dict(arguments))  # type: ignore[misc]  # of the class, not of an instance

  names = {key: getattr(cls, key) for key in ("__module__", "__qualname__", "__doc__")}
  return type(cls)(cls.__name__, (cls,), names | {"__init__": __init__})

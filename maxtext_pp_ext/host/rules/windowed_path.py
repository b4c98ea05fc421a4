# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Refuses models and features for which an implementation of ours cannot run the layers of a model without a pipeline.

Our implementations run the stacks that MaxText scans over (`host.replacements.scanned_layers`). What MaxText runs past
that scan would silently run without the window. Read in `maxtext/layers/nnx_decoders.py` of MaxText 0.2.5.
"""

from collections.abc import Iterator

from maxtext_pp_ext.config.derived import decoder_block
from maxtext_pp_ext.config.keys import Keys
from maxtext_pp_ext.host.models import cycles
from maxtext_pp_ext.host.rules import pipelined_path

# Blocks whose layers are scanned over, alone or in cycles.
SCANNED_BLOCKS = pipelined_path.UNIFORM_BLOCKS | cycles.CONFIGURED | cycles.FIXED.keys()
_NO_PIPELINE = "without a pipeline (ici_pipeline_parallelism=1, dcn_pipeline_parallelism=1)"
_OFF = "Set pipeline_impl=host"


def problems(config: Keys) -> list[str]:
  """Returns all problems of a config with one of our implementations and one stage; [] if there are none."""
  return [*_layers(config), *_multimodal(config), *pipelined_path.features(config, _FEATURES)]


def _layers(config: Keys) -> Iterator[str]:
  name, block = config.pipeline_impl, decoder_block(config)
  if not config.scan_layers:
    yield f"pipeline_impl={name} {_NO_PIPELINE} with scan_layers=False: it runs scanned layers. Set scan_layers=True."
  if block not in SCANNED_BLOCKS:
    yield (
        f"pipeline_impl={name} {_NO_PIPELINE} with decoder_block={block}: MaxText does not scan over its layers. {_OFF}."
    )
  blocks, in_block = cycles.scanned(config)
  if config.num_decoder_layers is not None and not blocks:
    yield (
        f"pipeline_impl={name} {_NO_PIPELINE} with {config.num_decoder_layers} layers of decoder_block={block}: MaxText "
        f"scans over blocks of {in_block}, and there is none. {_OFF}."
    )
  if config.use_batch_split_schedule:
    yield (
        f"pipeline_impl={name} {_NO_PIPELINE} with use_batch_split_schedule=True: MaxText runs these layers with a "
        f"schedule of its own. Set use_batch_split_schedule=False, or pipeline_impl=host."
    )


_FEATURES = {
    "engram_layers": (
        "layers need the tokens, which microbatches do not carry. Set engram_layers=[], or pipeline_impl=host."
    ),
    "use_lineage": "MaxText runs all layers itself. Set use_lineage=False, or pipeline_impl=host.",
    "use_m3_model": "m3 models have layers of their own. Set use_m3_model=False, or pipeline_impl=host.",
    # MaxText PR 4493; not in 0.2.5
    "prefetch_fsdp_weights": (
        "both this key and pipeline_impl gather a layer's weights ahead of time. Set prefetch_fsdp_weights=False, or "
        "pipeline_impl=host."
    ),
    "gradient_accumulation_schedule": (
        "MaxText runs the layers itself, one microbatch backward beside the next one forward. Set "
        "gradient_accumulation_schedule=serial, or pipeline_impl=host."
    ),
    "lora.enable_lora": (
        "LoRA makes its parameters when a layer is called. Set lora.enable_lora=False, or pipeline_impl=host."
    ),
    "parameter_memory_host_offload": (
        "MaxText moves the parameters of evaluations to the device within its scan over layers. Set "
        "parameter_memory_host_offload=False, or pipeline_impl=host."
    ),
    "distill_beta": (
        "MaxText compares features of layers, which microbatches give a further axis. Set distill_beta=0, or "
        "pipeline_impl=host."
    ),
}


def _multimodal(config: Keys) -> Iterator[str]:
  if config.use_multimodal and decoder_block(config) in ("gemma3", "gemma4"):
    yield (
        f"use_multimodal=True with decoder_block={decoder_block(config)}: its layers need the bidirectional mask of "
        "image tokens, which microbatches do not carry. Set use_multimodal=False, or pipeline_impl=host."
    )
  if config.use_multimodal and config.use_mrope:
    yield (
        "use_multimodal=True with use_mrope=True: positions have an axis for time, height and width, and cannot be "
        "divided into microbatches. Set use_multimodal=False, or pipeline_impl=host."
    )

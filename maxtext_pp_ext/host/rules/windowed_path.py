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
# Key -> why its feature is refused; `pipelined_path.features` adds what to set.
_FEATURES = {
    "engram_layers": "layers need the tokens, which microbatches do not carry.",
    "use_lineage": "MaxText runs all layers itself.",
    "use_m3_model": "m3 models have layers of their own.",
    # MaxText PR 4493; not in 0.2.5
    "prefetch_fsdp_weights": "both this key and pipeline_impl gather a layer's weights ahead of time.",
    "gradient_accumulation_schedule": (
        "MaxText runs the layers itself, one microbatch backward beside the next one forward."
    ),
    "lora.enable_lora": "LoRA makes its parameters when a layer is called.",
    "parameter_memory_host_offload": (
        "MaxText moves the parameters of evaluations to the device within its scan over layers."
    ),
    "distill_beta": "MaxText compares features of layers, which microbatches give a further axis.",
}


def problems(config: Keys) -> Iterator[str]:
  """Yields all problems of a config with one of our implementations and one stage."""
  given, block = f"pipeline_impl={config.pipeline_impl} {_NO_PIPELINE} with", decoder_block(config)
  if not config.scan_layers:
    yield f"{given} scan_layers=False: it runs scanned layers. Set scan_layers=True."
  if block not in SCANNED_BLOCKS:
    yield f"{given} decoder_block={block}: MaxText does not scan over its layers. Set pipeline_impl=host."
  blocks, in_block = cycles.scanned(config)
  if config.num_decoder_layers is not None and not blocks:
    yield (
        f"{given} {config.num_decoder_layers} layers of decoder_block={block}: MaxText scans over blocks of {in_block}, "
        "and there is none. Set pipeline_impl=host."
    )
  if config.use_batch_split_schedule:
    yield (
        f"{given} use_batch_split_schedule=True: MaxText runs these layers with a schedule of its own. Set "
        "use_batch_split_schedule=False, or pipeline_impl=host."
    )
  if config.use_multimodal and block in ("gemma3", "gemma4"):
    yield (
        f"use_multimodal=True with decoder_block={block}: its layers need the bidirectional mask of image tokens, which "
        "microbatches do not carry. Set use_multimodal=False, or pipeline_impl=host."
    )
  if config.use_multimodal and config.use_mrope:
    yield (
        "use_multimodal=True with use_mrope=True: positions have an axis for time, height and width, and cannot be "
        "divided into microbatches. Set use_multimodal=False, or pipeline_impl=host."
    )
  yield from pipelined_path.features(config, _FEATURES, instead=dict.fromkeys(_FEATURES, ", or pipeline_impl=host"))

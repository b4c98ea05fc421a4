# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""What MaxText's pipelined decoder would lose without a word, and is refused here instead.

Read in `maxtext/layers/nnx_decoders.py` and `maxtext/models/` of MaxText 0.2.4 and 0.2.5. The pipelined path builds each
stage's layers as `decoder_blocks[0](config, mesh, model_mode, quant, rngs)` (`decoder_blocks[1]` for DeepSeek), without
the arguments by which the path without a pipeline tells a layer its index; and it calls the pipeline module with inputs,
segment ids, positions, deterministic and model mode, nothing else.
"""

from collections.abc import Iterator
from typing import Any

# Every layer is the same, whatever its index. DeepSeek's dense layers differ, and the host runs them before the pipeline.
UNIFORM_BLOCKS = frozenset(
    {
        "default",
        "llama2",
        "mistral",
        "mixtral",
        "gemma",
        "gemma2",  # one layer holds a local and a global sublayer
        "gpt3",
        "qwen2",
        "qwen3",
        "qwen3_moe",
        "qwen3_custom_moe",
        "simple",
        "simple_mlp",
        "deepseek",
    }
)

# The unscanned layer's constructor wants this argument, and the pipelined path does not give it.
_INDEX_ARGUMENT = {
    "gpt_oss": "attention_type",
    "olmo3": "attention_type",
    "qwen3_next": "layer_idx",
    "qwen3_5": "layer_idx",
}
_GEMMA3_PERIOD = 6  # five local layers, then a global one


def problems(config: Any) -> list[str]:
  """Everything about the model that MaxText's pipelined path does not carry out; [] if nothing."""
  return [
      *_decoder_block(config),
      *_features(config),
      *_batch_split(config),
      *_multimodal(config),
      *_linen_decoder(config),
  ]


def _block(config: Any) -> str:
  return getattr(config.decoder_block, "value", config.decoder_block)


def _decoder_block(config: Any) -> Iterator[str]:
  reason = _block_problem(config)
  if reason is not None:
    yield (
        f"decoder_block={_block(config)} cannot be pipelined: {reason}. Set ici_pipeline_parallelism=1, "
        "dcn_pipeline_parallelism=1 and pipeline_impl=host, and shard over FSDP or tensor axes instead."
    )


def _block_problem(config: Any) -> str | None:
  """Why the pipelined path builds another model from this block than the path without a pipeline, or None."""
  block, layers = _block(config), config.num_decoder_layers
  if block in UNIFORM_BLOCKS or layers is None:
    return None
  if block in _INDEX_ARGUMENT:
    return _cyclic_block_problem(config, block)
  match block:
    case "gemma3" if layers < _GEMMA3_PERIOD:
      return None
    case "gemma3":
      return (
          f"MaxText would build all {layers} layers with local attention, where every {_GEMMA3_PERIOD}th has global "
          "attention"
      )
    case "gemma4":
      return "MaxText bypasses the pipeline for it (it calls _apply_gemma4_scanned_blocks)"
    case "gemma4_small":
      return "its layers share keys and values with, and differ by, other layers' indices; MaxText refuses it, too"
    case "deepseek4":
      return (
          "its layers differ by index (hash routing in the first ones, alternating compress_ratios); MaxText would "
          "build every stage alike"
      )
    case "llama4":
      return _llama4_problem(config)
    case "envy":
      return _envy_problem(config)
    case _:
      return "this version of maxtext-pp-ext does not know it, so it cannot tell whether every layer is the same"


def _cyclic_block_problem(config: Any, block: str) -> str | None:
  cycle = config.inhomogeneous_layer_cycle_interval
  if not config.scan_layers:
    argument = _INDEX_ARGUMENT[block]
    return f"its layers differ by index, and with scan_layers=False MaxText builds each stage without {argument}"
  if cycle == 1:
    return None
  return _deeper_model(config, cycle)


def _deeper_model(config: Any, cycle: int) -> str:
  return (
      f"with scan_layers=True what MaxText takes for one layer is a block of inhomogeneous_layer_cycle_interval={cycle} "
      f"different layers, so that num_decoder_layers={config.num_decoder_layers} would become "
      f"{config.num_decoder_layers * cycle} layers"
  )


def _llama4_problem(config: Any) -> str | None:
  cycle, nope, moe = (
      config.inhomogeneous_layer_cycle_interval,
      config.nope_layer_interval,
      config.interleave_moe_layer_step,
  )
  if config.scan_layers:
    if cycle != 1:
      return _deeper_model(config, cycle)
    if (nope, moe) == (1, 1):  # what the block's constructor takes if it is told nothing
      return None
    built = "without RoPE and with MoE"
  else:
    if not 0 < nope <= config.num_decoder_layers and not 0 < moe <= config.num_decoder_layers:
      return None
    built = "with RoPE and without MoE"
  return (
      f"MaxText would build every layer {built}, whatever nope_layer_interval={nope} and interleave_moe_layer_step={moe}"
  )


def _envy_problem(config: Any) -> str | None:
  cycle, moe = config.inhomogeneous_layer_cycle_interval, config.interleave_moe_layer_step
  if config.scan_layers and cycle != 1:
    return _deeper_model(config, cycle)
  # Built without MoE: right only if no layer is due to have it.
  if moe > (1 if config.scan_layers else config.num_decoder_layers):
    return None
  return f"MaxText would build every layer without MoE, whatever interleave_moe_layer_step={moe}"


def _features(config: Any) -> Iterator[str]:
  if config.engram_layers:
    yield (
        f"engram_layers={list(config.engram_layers)}: MaxText's pipelined path gives layers neither their index nor the "
        "tokens that engram needs. Set engram_layers=[]."
    )
  if getattr(config, "use_lineage", False):
    yield "use_lineage=True: MaxText uses it only on the path without a pipeline. Set use_lineage=False."
  if config.mhc_expansion_rate > 1:
    yield (
        f"mhc_expansion_rate={config.mhc_expansion_rate}: activations have four axes [batch, sequence, stream, embed], "
        "a pipeline passes on three. Set mhc_expansion_rate=1."
    )


# What does not go together with the batch-split schedule, what to set it to, and why.
_NOT_WITH_BATCH_SPLIT = (
    ("load_balance_loss_weight", "0", "the loss of a batch is not the mean of its parts'"),
    (
        "mtp_num_layers",
        "0",
        "MaxText has the layers of multi-token prediction use its own schedule, outside of pipelines",
    ),
    ("quantization", '""', "MaxText quantizes its own schedule only"),
    ("te_moe_block", "False", "it reports how full the buffers of a whole batch are"),
    ("use_qk_clip", "False", "it needs the largest logit of a whole batch"),
)


def _batch_split(config: Any) -> Iterator[str]:
  """See `host.batch_split`."""
  if not config.use_batch_split_schedule:
    return
  given, without = "use_batch_split_schedule=True", "or use_batch_split_schedule=False"
  if _block(config) != "deepseek" or config.num_experts <= 1:
    yield (
        f"{given} with decoder_block={_block(config)} and num_experts={config.num_experts}: only DeepSeek's MoE layers "
        "have that schedule. Set use_batch_split_schedule=False."
    )
  for key, off, reason in _NOT_WITH_BATCH_SPLIT:
    value = getattr(config, key, None)  # MaxText 0.2.4 has no te_moe_block
    if getattr(value, "value", value):
      yield f"{given} with {key}={getattr(value, 'value', value)}: {reason}. Set {key}={off}, {without}."
  factor, batch, microbatches = (
      config.batch_split_factor,
      config.micro_batch_size_to_train_on,
      config.num_pipeline_microbatches,
  )
  if factor < 1:
    yield f"{given} with batch_split_factor={factor}. Set batch_split_factor to at least 1 (2 is usual), {without}."
  elif batch and batch > 0 and microbatches > 0 and batch % microbatches == 0 and batch // microbatches % factor:
    yield (
        f"{given}: a microbatch of {batch // microbatches} rows ({batch} / num_pipeline_microbatches={microbatches}) "
        f"cannot be divided into batch_split_factor={factor} parts. Set per_device_batch_size="
        f"{config.per_device_batch_size * factor:g}, or another batch_split_factor, {without}."
    )


def _multimodal(config: Any) -> Iterator[str]:
  if not config.use_multimodal:
    return
  if _block(config) in ("gemma3", "gemma4"):
    yield (
        f"use_multimodal=True with decoder_block={_block(config)}: its layers need the bidirectional mask of image "
        "tokens, which MaxText's pipelined path drops. Set use_multimodal=False."
    )
  if config.deepstack_visual_indexes_for_vit:
    yield (
        f"use_multimodal=True with deepstack_visual_indexes_for_vit={list(config.deepstack_visual_indexes_for_vit)}: "
        "MaxText's pipelined path drops the visual features that are added after the first layers. Set "
        "use_multimodal=False."
    )
  if config.use_mrope:
    yield (
        "use_multimodal=True with use_mrope=True: positions have an axis for time, height and width, which MaxText's "
        "pipeline cannot divide into microbatches. Set use_multimodal=False."
    )


def _linen_decoder(config: Any) -> Iterator[str]:
  # Only 0.2.4 has the key. Its Linen decoder takes the pipeline from our factory but drops arguments where we do not see.
  if not getattr(config, "pure_nnx_decoder", True):
    yield "pure_nnx_decoder=False: implementations of maxtext-pp-ext need the NNX decoder. Set pure_nnx_decoder=True."

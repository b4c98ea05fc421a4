# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""What MaxText's pipelined decoder would lose without a word, and is refused here instead.

Read in `maxtext/layers/nnx_decoders.py` and `maxtext/models/` of MaxText. The pipelined path builds each
stage's layers as `decoder_blocks[0](config, mesh, model_mode, quant, rngs)` (`decoder_blocks[1]` for DeepSeek), without
the arguments by which the path without a pipeline tells a layer its index (of blocks of a whole cycle of layers `cycles`
makes stages that are right); and it calls the pipeline module with inputs,
segment ids, positions, deterministic and model mode, nothing else.
"""

from collections.abc import Iterator

from maxtext_pp_ext.config.derived import decoder_block
from maxtext_pp_ext.config.host_keys import HostKeys
from maxtext_pp_ext.config.remedies import Problem
from maxtext_pp_ext.config.view import plain
from maxtext_pp_ext.host.models import cycles
from maxtext_pp_ext.host.rules import propose

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

# A number of cycles in a stage that is proposed by itself is at most so large.
_MOST_CYCLES = 16
# The unscanned layer's constructor wants this argument, and the pipelined path does not give it.
_INDEX_ARGUMENT = {
    "gpt_oss": "attention_type",
    "olmo3": "attention_type",
    "qwen3_next": "layer_idx",
    "qwen3_5": "layer_idx",
}


def problems(config: HostKeys) -> list[str]:
  """Everything about the model that MaxText's pipelined path does not carry out; [] if nothing."""
  return [
      *_decoder_block(config),
      *_features(config),
      *_batch_split(config),
      *_metrics_of_layers(config),
      *_multimodal(config),
      *_linen_decoder(config),
      *_past_the_decoder(config),
  ]


def _decoder_block(config: HostKeys) -> Iterator[str]:
  block = decoder_block(config)
  if block in UNIFORM_BLOCKS or config.num_decoder_layers is None:
    yield from _cycles_of_equal_layers(config, block)
    return
  if config.scan_layers and (block in cycles.CONFIGURED or block == "gemma3"):
    yield from _whole_cycles(config, block, config.num_decoder_layers)
    return
  reason = _block_problem(config, block, config.num_decoder_layers)
  if reason is not None:
    yield (
        f"decoder_block={block} cannot be pipelined: {reason}. Set ici_pipeline_parallelism=1, "
        "dcn_pipeline_parallelism=1 and pipeline_impl=host, and shard over FSDP or tensor axes instead."
    )


def _cycles_of_equal_layers(config: HostKeys, block: str) -> Iterator[str]:
  """Without a pipeline MaxText takes each layer of such a block for a cycle, and scans over so many fewer."""
  interval = config.inhomogeneous_layer_cycle_interval
  if block in UNIFORM_BLOCKS - {"deepseek"} and config.scan_layers and interval != 1:
    yield (
        f"decoder_block={block} with inhomogeneous_layer_cycle_interval={interval}: all its layers are alike, and "
        f"without a pipeline MaxText would build num_decoder_layers={config.num_decoder_layers} / {interval} of them. "
        "Set inhomogeneous_layer_cycle_interval=1, and base_num_decoder_layers to the number of layers."
    )


def _whole_cycles(config: HostKeys, block: str, total: int) -> Iterator[str]:
  """A stage has to begin where a cycle of different layers begins; see `cycles`."""
  cycle, per_stage = cycles.length(config), config.num_layers_per_pipeline_stage
  if cycle <= 1:
    return
  key = "" if block == "gemma3" else "inhomogeneous_layer_cycle_interval="
  if per_stage < cycle or per_stage % cycle:
    yield Problem(
        f"decoder_block={block} cannot be pipelined with num_layers_per_pipeline_stage={per_stage}: its layers come in "
        f"cycles of {key}{cycle}, and a stage has to hold whole cycles.",
        *({"num_layers_per_pipeline_stage": count * cycle} for count in range(1, min(total // cycle, _MOST_CYCLES) + 1)),
        otherwise=f"num_layers_per_pipeline_stage={cycle} or a multiple of it, and so many stages that "
        "num_decoder_layers is a multiple of the layers of all stages",
    )
  layers = config.pipeline_parallel_layers
  if layers not in (-1, total):
    yield Problem(
        f"decoder_block={block} cannot be pipelined with pipeline_parallel_layers={layers} of {total} layers: "
        f"its layers come in cycles of {key}{cycle}, and MaxText would take each of the {total - layers} layers outside "
        "the pipeline for a cycle.",
        {"pipeline_parallel_layers": -1},
    )


def _block_problem(config: HostKeys, block: str, total: int) -> str | None:
  """Why the pipelined path builds another model from this block than the path without a pipeline, or None."""
  unscanned = "its layers differ by index, and with scan_layers=False MaxText builds each stage"
  match block:
    case _ if block in _INDEX_ARGUMENT:
      return f"{unscanned} without {_INDEX_ARGUMENT[block]} (with scan_layers=True stages of whole cycles are possible)"
    case "gemma3" if total < cycles.GEMMA3_PERIOD:
      return None
    case "gemma3":
      return (
          f"{unscanned} with local attention, where every {cycles.GEMMA3_PERIOD}th layer has global attention (with "
          "scan_layers=True stages of whole cycles are possible)"
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
      return _unscanned_llama4_problem(config, total)
    case "envy":
      return _unscanned_envy_problem(config, total)
    case _:
      return "this version of maxtext-pp-ext does not know it, so it cannot tell whether every layer is the same"


def _unscanned_llama4_problem(config: HostKeys, total: int) -> str | None:
  nope, moe = config.nope_layer_interval, config.interleave_moe_layer_step
  if not 0 < nope <= total and not 0 < moe <= total:
    return None
  return (
      f"with scan_layers=False MaxText would build every layer with RoPE and without MoE, whatever nope_layer_interval="
      f"{nope} and interleave_moe_layer_step={moe} (with scan_layers=True stages of whole cycles are possible)"
  )


def _unscanned_envy_problem(config: HostKeys, total: int) -> str | None:
  moe = config.interleave_moe_layer_step
  if moe > total:  # Built without MoE: right only if no layer is due to have it.
    return None
  return (
      f"with scan_layers=False MaxText would build every layer without MoE, whatever interleave_moe_layer_step={moe} "
      "(with scan_layers=True stages of whole cycles are possible)"
  )


def _features(config: HostKeys) -> Iterator[str]:
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
    ("indexer_loss_scaling_factor", "0", "a layer keeps the loss of one part"),
    ("use_qk_clip", "False", "it needs the largest logit of a whole batch"),
)


def _batch_split(config: HostKeys) -> Iterator[str]:
  """See `host.replacements.batch_split`."""
  if not config.use_batch_split_schedule:
    return
  given, without = "use_batch_split_schedule=True", "or use_batch_split_schedule=False"
  if decoder_block(config) != "deepseek" or config.num_experts <= 1:
    yield (
        f"{given} with decoder_block={decoder_block(config)} and num_experts={config.num_experts}: only DeepSeek's MoE "
        "layers have that schedule. Set use_batch_split_schedule=False."
    )
  for key, off, reason in _NOT_WITH_BATCH_SPLIT:
    value = getattr(config, key, None)  # MaxText 0.2.4 has no te_moe_block
    if plain(value):
      yield f"{given} with {key}={getattr(value, 'value', value)}: {reason}. Set {key}={off}, {without}."
  factor, batch, microbatches = (
      config.batch_split_factor,
      config.micro_batch_size_to_train_on,
      config.num_pipeline_microbatches,
  )
  if factor < 1:
    yield f"{given} with batch_split_factor={factor}. Set batch_split_factor to at least 1 (2 is usual), {without}."
  elif batch and batch > 0 and microbatches > 0 and batch % microbatches == 0 and batch // microbatches % factor:
    yield Problem(
        f"{given}: a microbatch of {batch // microbatches} rows ({batch} / num_pipeline_microbatches={microbatches}) "
        f"cannot be divided into batch_split_factor={factor} parts.",
        *({"per_device_batch_size": size} for size in propose.batches(config, microbatches, units=(factor,))),
        {"use_batch_split_schedule": False},
    )


_MOST_IN_ORDER = 10  # numbered names in the order of their letters: layers_10 is before layers_2


def _metrics_of_layers(config: HostKeys) -> Iterator[str]:
  """MaxText numbers what layers sow in the order of their names in the model, not in the order in which they run."""
  if not config.record_internal_nn_metrics or config.num_decoder_layers is None:
    return
  given = f"record_internal_nn_metrics={config.record_internal_nn_metrics}"
  why = "would be reported under other layers' numbers (activ_mean/layer_000 and so on)"
  block, per_stage, layers = decoder_block(config), config.num_layers_per_pipeline_stage, config.pipeline_parallel_layers
  dense = config.first_num_dense_layers if block == "deepseek" else 0
  outside = 0 if layers == -1 or config.num_decoder_layers is None else config.num_decoder_layers - dense - layers
  if outside > 0 and block != "deepseek":  # whose layers outside come first, by name as well
    yield (
        f"{given} with {outside} layers outside the pipeline (pipeline_parallel_layers={layers}): layers_outside_pipeline"
        f" run last and are first by name, so that all layers {why}. Set pipeline_parallel_layers=-1, or "
        "record_internal_nn_metrics=0."
    )
  if max(outside, dense) > _MOST_IN_ORDER and not config.scan_layers:
    yield (
        f"{given} with scan_layers=False and {max(outside, dense)} layers of a kind outside the pipeline: more than "
        f"{_MOST_IN_ORDER} {why}, as without a pipeline. Set scan_layers=True, or record_internal_nn_metrics=0."
    )
  if cycles.length(config) > 1:
    yield (
        f"{given} with decoder_block={block}, whose layers come in cycles of {cycles.length(config)}: they {why}, as "
        "without a pipeline. Set record_internal_nn_metrics=0."
    )
  elif per_stage > 1 and not config.scan_layers_per_stage:
    yield (
        f"{given} with num_layers_per_pipeline_stage={per_stage}: layers of a stage that are not stacked {why}. Set "
        "scan_layers_per_stage=True, num_layers_per_pipeline_stage=1, or record_internal_nn_metrics=0."
    )


def _multimodal(config: HostKeys) -> Iterator[str]:
  if not config.use_multimodal:
    return
  if decoder_block(config) in ("gemma3", "gemma4"):
    yield (
        f"use_multimodal=True with decoder_block={decoder_block(config)}: its layers need the bidirectional mask of "
        "image tokens, which MaxText's pipelined path drops. Set use_multimodal=False."
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


def _past_the_decoder(config: HostKeys) -> Iterator[str]:
  """What finds the decoder's layers where they are without a pipeline, or builds none of them."""
  if getattr(config, "use_m3_model", False):
    yield (
        "use_m3_model=True: MaxText's m3 models have no pipeline, and all stages would compute the same. Set "
        "use_m3_model=False, or train without a pipeline."
    )
  if getattr(config.lora, "enable_lora", False):
    yield (
        "lora.enable_lora=True: LoRA finds modules by their paths in a model without a pipeline, and makes its "
        "parameters when a layer is called. Set lora.enable_lora=False, or fine-tune without a pipeline."
    )
  if config.distill_beta > 0:
    yield (
        f"distill_beta={config.distill_beta}: MaxText compares features of the decoder's last stack of layers, and takes "
        "its first axis for that of the layers. A pipeline has them by repeat, stage and microbatch. Set distill_beta=0, "
        "or distill without a pipeline."
    )


def _linen_decoder(config: HostKeys) -> Iterator[str]:
  # Only 0.2.4 has the key. Its Linen decoder takes the pipeline from our factory but drops arguments where we do not see.
  if not getattr(config, "pure_nnx_decoder", True):
    yield "pure_nnx_decoder=False: implementations of maxtext-pp-ext need the NNX decoder. Set pure_nnx_decoder=True."

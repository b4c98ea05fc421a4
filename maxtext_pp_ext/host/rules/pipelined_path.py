# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Refuses models and features that MaxText's pipelined decoder would silently train wrongly.

Read in `maxtext/layers/nnx_decoders.py` and `maxtext/models/` of MaxText. The pipelined path loses information twice:

- It builds each stage's layers as `decoder_blocks[0](config, mesh, model_mode, quant, rngs)` (`decoder_blocks[1]` for
  DeepSeek), without the arguments that tell a layer its index. `cycles` builds correct stages of whole cycles of layers.
- It calls the pipeline module with inputs, segment ids, positions, deterministic and model mode, and nothing else.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from maxtext_pp_ext.config.derived import decoder_block
from maxtext_pp_ext.config.host_keys import HostKeys
from maxtext_pp_ext.config.remedies import Problem
from maxtext_pp_ext.config.view import plain
from maxtext_pp_ext.host.models import cycles
from maxtext_pp_ext.host.rules import candidates
from maxtext_pp_ext.host.rules.sizes import layers_outside

# All layers are the same, whatever their index: one of gemma2 holds a local and a global sublayer. Exception: DeepSeek's
# dense layers, which run before the pipeline.
UNIFORM_BLOCKS = frozenset("default llama2 mistral mixtral gemma gemma2 gpt3 qwen2 qwen3 qwen3_moe".split())
UNIFORM_BLOCKS |= {"qwen3_custom_moe", "simple", "simple_mlp", "deepseek"}
# The most cycles per stage that a message proposes.
_MOST_CYCLES = 16
_UNSCANNED = "its layers differ by index, and with scan_layers=False MaxText builds each stage"
_SCANNED = "(with scan_layers=True stages of whole cycles are possible)"
# Block -> why the pipelined path builds a different model from it than the path without one.
_UNEQUAL = {
    # The pipelined path omits an argument that the unscanned layer's constructor needs.
    **dict.fromkeys(("gpt_oss", "olmo3"), f"{_UNSCANNED} without attention_type {_SCANNED}"),
    **dict.fromkeys(("qwen3_next", "qwen3_5"), f"{_UNSCANNED} without layer_idx {_SCANNED}"),
    "gemma3": (
        f"{_UNSCANNED} with local attention, where every {cycles.GEMMA3_PERIOD}th layer has global attention {_SCANNED}"
    ),
    "gemma4": "MaxText bypasses the pipeline that it has built for it, and fails (it calls _apply_gemma4_scanned_blocks)",
    "gemma4_small": "its layers differ by index and share keys and values with other layers; MaxText refuses it, too",
    "deepseek4": (
        "its layers differ by index (hash routing in the first ones, alternating compress_ratios); MaxText would build "
        "every stage alike"
    ),
}


def problems(config: HostKeys) -> Iterator[str]:
  """Yields all problems with what MaxText's pipelined path does not support."""
  yield from _decoder_block(config)
  yield from features(config, _FEATURES, instead=_INSTEAD)
  if config.mhc_expansion_rate > 1:
    yield (
        f"mhc_expansion_rate={config.mhc_expansion_rate}: activations have four axes [batch, sequence, stream, embed], "
        "but a pipeline passes three. Set mhc_expansion_rate=1."
    )
  if config.use_batch_split_schedule:
    yield from _batch_split(config)
  if config.record_internal_nn_metrics and config.num_decoder_layers is not None:
    yield from _metrics_of_layers(config)
  if config.use_multimodal:
    yield from _multimodal(config)


def _decoder_block(config: HostKeys) -> Iterator[str]:
  block = decoder_block(config)
  if block in UNIFORM_BLOCKS or config.num_decoder_layers is None:
    # Without a pipeline MaxText counts each layer of such a block as a whole cycle, and scans over fewer layers.
    interval = config.inhomogeneous_layer_cycle_interval
    if block in UNIFORM_BLOCKS - {"deepseek"} and config.scan_layers and interval != 1:
      yield (
          f"decoder_block={block} with inhomogeneous_layer_cycle_interval={interval}: all its layers are alike, and "
          f"without a pipeline MaxText would build num_decoder_layers={config.num_decoder_layers} / {interval} of them. "
          "Set inhomogeneous_layer_cycle_interval=1, and base_num_decoder_layers to the number of layers."
      )
    return
  if config.scan_layers and (block in cycles.CONFIGURED or block == "gemma3"):
    yield from _whole_cycles(config, block, config.num_decoder_layers)
    return
  if (reason := _block_problem(config, block, config.num_decoder_layers)) is not None:
    yield (
        f"decoder_block={block} cannot be pipelined: {reason}. Set ici_pipeline_parallelism=1, "
        "dcn_pipeline_parallelism=1 and pipeline_impl=host, and shard over FSDP or tensor axes instead."
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
        otherwise=f"num_layers_per_pipeline_stage={cycle} or a multiple of it, and the number of stages so "
        "that stages × num_layers_per_pipeline_stage divides num_decoder_layers",
    )
  if (layers := config.pipeline_parallel_layers) not in (-1, total):
    yield Problem(
        f"decoder_block={block} cannot be pipelined with pipeline_parallel_layers={layers} of {total} layers: "
        f"its layers come in cycles of {key}{cycle}, and MaxText would treat each of the {total - layers} layers "
        "outside the pipeline as a whole cycle.",
        {"pipeline_parallel_layers": -1},
    )


def _block_problem(config: HostKeys, block: str, total: int) -> str | None:
  """Returns why the pipelined path builds a different model from this block than the path without one, or None."""
  every_layer, moe = "with scan_layers=False MaxText would build every layer", config.interleave_moe_layer_step
  match block:
    case "gemma3" if total < cycles.GEMMA3_PERIOD:
      return None
    case _ if block in _UNEQUAL:
      return _UNEQUAL[block]
    case "llama4" if 0 < config.nope_layer_interval <= total or 0 < moe <= total:
      given = f"nope_layer_interval={config.nope_layer_interval} and interleave_moe_layer_step={moe}"
      return f"{every_layer} with RoPE and without MoE, whatever {given} {_SCANNED}"
    case "envy" if moe <= total:
      return f"{every_layer} without MoE, whatever interleave_moe_layer_step={moe} {_SCANNED}"
    case "llama4" | "envy":  # of such layers none has RoPE left out, or MoE
      return None
    case _:
      return "this version of maxtext-pp-ext does not know it, so it cannot tell whether every layer is the same"


# Key -> why its feature is refused. `features` adds what to set.
_FEATURES = {
    "engram_layers": "MaxText's pipelined path gives layers neither their index nor the tokens that engram needs.",
    "use_lineage": "MaxText uses it only on the path without a pipeline.",
    # What looks for decoder layers at their paths without a pipeline, or builds no decoder layers.
    "use_m3_model": "MaxText's m3 models have no pipeline, and all stages would compute the same.",
    # MaxText PR 4493; not in 0.2.5
    "prefetch_fsdp_weights": (
        "MaxText gathers the weights of scanned layers ahead of time, also of those outside the pipeline, whose losses "
        "it drops."
    ),
    # `dual_pipe` is such a schedule (MaxText's main branch of November 2026; 0.2.5 lacks the key).
    "gradient_accumulation_schedule": (
        "MaxText runs the layers of a model without a pipeline itself, one microbatch backward beside the next one "
        "forward."
    ),
    "lora.enable_lora": (
        "LoRA finds modules by their paths in a model without a pipeline, and makes its parameters when a layer is "
        "called."
    ),
    "distill_beta": (
        "MaxText compares features of the decoder's last stack of layers, and assumes that their first axis counts "
        "layers. A pipeline orders them by repeat, stage and microbatch."
    ),
}
_INSTEAD = {
    "use_m3_model": ", or train without a pipeline",
    "prefetch_fsdp_weights": ", or pipeline_impl=host",
    "lora.enable_lora": ", or fine-tune without a pipeline",
    "distill_beta": ", or distill without a pipeline",
}
_OR_WITHOUT = ", or use_batch_split_schedule=False"
_NOT_WITH_BATCH_SPLIT = {
    "load_balance_loss_weight": "the loss of a batch is not the mean of its parts'.",
    "mtp_num_layers": "MaxText runs the layers of multi-token prediction outside the pipeline, with its own schedule.",
    "quantization": "MaxText quantizes its own schedule only.",
    "te_moe_block": "it reports how full the buffers of a whole batch are.",
    "indexer_loss_scaling_factor": "a layer keeps the loss of one part.",
    "use_qk_clip": "it needs the largest logit of a whole batch.",
}
# Key -> the value that turns its feature off; False for others.
_OFF = dict.fromkeys(("load_balance_loss_weight", "mtp_num_layers", "indexer_loss_scaling_factor", "distill_beta"), "0")
_OFF |= {"engram_layers": "[]", "gradient_accumulation_schedule": "serial", "quantization": '""'}


def features(
    config: HostKeys, refused: Mapping[str, str], given: str = "", instead: Mapping[str, str] = MappingProxyType({})
) -> Iterator[str]:
  """Yields a problem, which begins with `given`, for each feature that is on.

  `refused`: key -> why the feature is refused. A dot leads to a key within a key. A MaxText may lack it.
  `instead`: key -> other ways out than to turn the feature off.
  """
  for key, why in refused.items():
    value: Any = config
    for name in key.split("."):
      value = plain(getattr(value, name, None))
    off = _OFF.get(key, "False")
    if value and value != off and not (isinstance(value, int | float) and value < 0):
      yield f"{given}{key}={value}: {why} Set {key}={off}{instead.get(key, '')}."


def _batch_split(config: HostKeys) -> Iterator[str]:
  given = "use_batch_split_schedule=True"
  if decoder_block(config) != "deepseek" or config.num_experts <= 1:
    yield (
        f"{given} with decoder_block={decoder_block(config)} and num_experts={config.num_experts}: only DeepSeek's MoE "
        "layers have that schedule. Set use_batch_split_schedule=False."
    )
  yield from features(config, _NOT_WITH_BATCH_SPLIT, f"{given} with ", dict.fromkeys(_NOT_WITH_BATCH_SPLIT, _OR_WITHOUT))
  factor, microbatches = config.batch_split_factor, config.num_pipeline_microbatches
  batch = config.micro_batch_size_to_train_on
  if factor < 1:
    yield f"{given} with batch_split_factor={factor}. Set batch_split_factor to at least 1 (2 is usual){_OR_WITHOUT}."
  elif batch and batch > 0 and microbatches > 0 and batch % microbatches == 0 and batch // microbatches % factor:
    yield Problem(
        f"{given}: a microbatch of {batch // microbatches} rows ({batch} / num_pipeline_microbatches={microbatches}) "
        f"cannot be divided into batch_split_factor={factor} parts.",
        *({"per_device_batch_size": size} for size in candidates.batches(config, microbatches, units=(factor,))),
        {"use_batch_split_schedule": False},
    )


_MOST_IN_ORDER = 10  # names sort alphabetically: layers_10 comes before layers_2


def _metrics_of_layers(config: HostKeys) -> Iterator[str]:
  """MaxText numbers sown metrics by the order of layer names in the model, not by the order in which layers run."""
  given = f"record_internal_nn_metrics={config.record_internal_nn_metrics}"
  why = "would be reported under other layers' numbers (activ_mean/layer_000 and so on)"
  block, per_stage, layers = decoder_block(config), config.num_layers_per_pipeline_stage, config.pipeline_parallel_layers
  dense, outside = config.first_num_dense_layers if block == "deepseek" else 0, layers_outside(config)
  if outside > 0 and block != "deepseek":  # DeepSeek's layers outside run first and sort first
    yield (
        f"{given} with {outside} layers outside the pipeline (pipeline_parallel_layers={layers}): layers_outside_pipeline"
        f" run last but sort first by name, so all layers {why}. Set pipeline_parallel_layers=-1, or "
        "record_internal_nn_metrics=0."
    )
  if max(outside, dense) > _MOST_IN_ORDER and not config.scan_layers:
    yield (
        f"{given} with scan_layers=False and {max(outside, dense)} layers of one kind outside the pipeline: with more "
        f"than {_MOST_IN_ORDER}, layers {why}, also without a pipeline. Set scan_layers=True, or "
        "record_internal_nn_metrics=0."
    )
  if cycles.length(config) > 1:
    yield (
        f"{given} with decoder_block={block}, whose layers come in cycles of {cycles.length(config)}: they {why}, also "
        "without a pipeline. Set record_internal_nn_metrics=0."
    )
  elif per_stage > 1 and not config.scan_layers_per_stage:
    yield (
        f"{given} with num_layers_per_pipeline_stage={per_stage}: layers of a stage that are not stacked {why}. Set "
        "scan_layers_per_stage=True, num_layers_per_pipeline_stage=1, or record_internal_nn_metrics=0."
    )


def _multimodal(config: HostKeys) -> Iterator[str]:
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

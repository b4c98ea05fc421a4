# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The models and TPU topologies to compile for, and the pipelines to compare on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses

from maxtext_pp_ext.host.models import variants

PLAIN = "host plain"
KEEPS = "kept activations"  # in the name of a row
# MaxText's default attention kernel on TPU, and nothing that needs storage or data.
COMMON = {
    "attention": "flash",
    "compile_topology_num_slices": 1,
    "dataset_type": "synthetic",
    "enable_checkpointing": False,
}


_DEEPSEEK = {
    "compile_topology": "v5p-1024",
    "allow_split_physical_axes": True,
    "ici_pipeline_parallelism": 4,
    "ici_expert_parallelism": 8,
    "ici_fsdp_parallelism": 16,
    "per_device_batch_size": 4,
    "max_target_length": 2048,
}
# One sequence of 4096 per chip, without the batch-split schedule.
_DEEPSEEK_4096 = _DEEPSEEK | {
    "use_batch_split_schedule": False,
    "per_device_batch_size": 1,
    "max_target_length": 4096,
    "num_pipeline_microbatches": 4,
}


# All that backward needs but the second projection of the MLP and its output: what fits beside Llama 3 70B's weights on
# v5p-256. Recipes for Llama 3 keep these, and more or less of the MLP (github.com/AI-Hypercomputer/tpu-recipes, c8cfe2f,
# training/).
_KEPT: dict[str, object] = {
    "remat_policy": "custom",
    "query_proj": "device",
    "key_proj": "device",
    "value_proj": "device",
    "context": "device",
    "mlpwi_0": "device",
}
# Recipes for models with experts keep layers' inputs in the host's memory: DeepSeek-V3 on tpu7x, Llama 4 Scout on v5p
# (the same source).
_INPUTS_OFFLOADED: dict[str, object] = {"remat_policy": "custom", "decoder_layer_input": "offload"}
# Llama 3.1 8B's and Mixtral 8x7B's on v6e (`published.yml`): all of attention but its context.
_ATTENTION_OFFLOADED = _INPUTS_OFFLOADED | dict.fromkeys(("out_proj", "query_proj", "key_proj", "value_proj"), "offload")
# What `maxtext-pp plan` chooses without a pipeline for gpt-oss-120b and Qwen3 235B-A22B, and with two tensors more for
# Mixtral 8x7B. On v5p the link to the host's memory is half as fast as on tpu7x, and what gpt-oss-120b's recipe offloads
# (the MLPs' outputs, too) takes longer than to recompute it. Llama 3 8B with 4 sequences of 4096 has room for no more.
_ATTENTION_KEPT: dict[str, object] = {"remat_policy": "custom"}
_ATTENTION_KEPT |= dict.fromkeys(("context", "query_proj", "key_proj", "value_proj", "out_proj"), "device")
_EXPERTS_KEPT = _ATTENTION_KEPT | {"moe_x_sorted": "device", "moe_mlpwo": "device"}
_MOST_KEPT = _ATTENTION_KEPT | {"mlpwi_0": "device", "mlpwi_1": "device"}
# What plan chooses for windows with 8 microbatches, which keep it for all of them.
_LITTLE_KEPT: dict[str, object] = {"remat_policy": "custom", "key_proj": "device", "value_proj": "device"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
  """A model on a topology."""

  title: str  # the heading of its table
  keys: dict[str, object]  # MaxText's keys
  preset: str | None = None  # the preset that replaces MaxText's base.yml; None for base.yml
  # Other values of keys for the row without a pipeline or window, and for these two.
  without: dict[str, object] = dataclasses.field(default_factory=dict)
  one_stage: dict[str, object] = dataclasses.field(default_factory=dict)
  # The remat policy of the rows with kept activations, that of a published recipe or of one near it; empty if none is.
  kept: dict[str, object] = dataclasses.field(default_factory=dict)
  # The same for the row without a pipeline, where its batch is divided otherwise; empty if it is `kept`.
  kept_without: dict[str, object] = dataclasses.field(default_factory=dict)


_OVER_4_SLICES = {
    "model_name": "llama3-8b",
    "compile_topology": "v6e-16",
    "compile_topology_num_slices": 4,
    "dcn_pipeline_parallelism": 4,
    "ici_fsdp_parallelism": 16,
    "num_pipeline_microbatches": 8,
    "per_device_batch_size": 2,
    "max_target_length": 4096,
}
_REPLICAS_OVER_4_SLICES: dict[str, object] = {
    "dcn_pipeline_parallelism": 1,
    "dcn_fsdp_parallelism": 1,
    "dcn_data_parallelism": 4,
}
_MIXTRAL = {
    "model_name": "mixtral-8x7b",
    "compile_topology": "v5p-64",
    "ici_pipeline_parallelism": 4,
    "ici_expert_parallelism": 4,
    "ici_fsdp_parallelism": 2,
    "num_pipeline_microbatches": 8,
    "per_device_batch_size": 2,
    "max_target_length": 2048,
}
# Models over all chips, without stages.
_70B_OVER_128: dict[str, object] = {
    "model_name": "llama3-70b",
    "compile_topology": "v5p-256",
    "ici_fsdp_parallelism": 128,
    "max_target_length": 4096,
}
_8B_OVER_16: dict[str, object] = {
    "model_name": "llama3-8b",
    "compile_topology": "v6e-16",
    "ici_fsdp_parallelism": 16,
    "max_target_length": 2048,
}
_MIXTRAL_OVER_32: dict[str, object] = _MIXTRAL | {"ici_pipeline_parallelism": 1, "ici_fsdp_parallelism": 8}
# Eight times the batch: 16 sequences per chip in 8 microbatches, and in 8 parts without a window. The window computes the
# logits in parts, too. Shapes in 8 parts are for windows that accumulate gradients as MaxText does.
_IN_8_MICROBATCHES: dict[str, object] = {
    "num_pipeline_microbatches": 8,
    "per_device_batch_size": 16,
    "num_vocab_tiling": 8,
    "vocab_tiling_ag_once": True,
}
_IN_8_PARTS: dict[str, object] = {
    "gradient_accumulation_steps": 8,
    "per_device_batch_size": 2,
    "num_vocab_tiling": 1,
    "vocab_tiling_ag_once": False,
}
# A capacity, and dense dispatch: the path of MaxText that each of its own pipelines can trace.
_CAPACITY = {"sparse_matmul": False, "megablox": False, "capacity_factor": 1.25}


SHAPES = {
    "llama3-70b": Shape(
        title="Llama 3 70B, v5p-256 (128 chips), 4 stages × FSDP 32",
        keys={
            "model_name": "llama3-70b",
            "compile_topology": "v5p-256",
            "ici_pipeline_parallelism": 4,
            "ici_fsdp_parallelism": 32,
            "num_pipeline_microbatches": 8,
            "per_device_batch_size": 2,
            "max_target_length": 4096,
        },
        kept=_KEPT,
    ),
    # What layers keep goes to the host's memory.
    "llama3-70b-8-batches": Shape(
        title="Llama 3 70B, v5p-256 (128 chips), FSDP 128, 16 sequences per chip",
        keys=_70B_OVER_128 | _INPUTS_OFFLOADED | _IN_8_MICROBATCHES,
        without=_IN_8_PARTS | {"remat_policy": "full", "decoder_layer_input": "device"},
        kept=_LITTLE_KEPT | {"decoder_layer_input": "offload"},
        kept_without=_KEPT,
    ),
    "llama3-70b-8-parts": Shape(
        title="Llama 3 70B, v5p-256 (128 chips), FSDP 128, 16 sequences per chip in 8 parts",
        keys=_70B_OVER_128 | _IN_8_PARTS,
        kept=_KEPT,
    ),
    "llama3-8b-8-batches": Shape(
        title="Llama 3 8B, v6e-16, FSDP 16, 16 sequences of 2048 per chip",
        keys=_8B_OVER_16 | _IN_8_MICROBATCHES,
        without=_IN_8_PARTS,
        kept=_LITTLE_KEPT | {"mlpwi_0": "offload"},
        kept_without=_MOST_KEPT,
    ),
    "llama3-8b-8-parts": Shape(
        title="Llama 3 8B, v6e-16, FSDP 16, 16 sequences of 2048 per chip in 8 parts",
        keys=_8B_OVER_16 | _IN_8_PARTS,
        kept=_MOST_KEPT,
    ),
    "mixtral-8x7b-8-batches": Shape(
        title="Mixtral 8x7B, v5p-64 (32 chips), expert 4 × FSDP 8, 16 sequences of 2048 per chip",
        keys=_MIXTRAL_OVER_32 | _IN_8_MICROBATCHES,
        without=_IN_8_PARTS,
        # Sorted tokens in the last quarter of the iterations.
        kept=_EXPERTS_KEPT
        | {"moe_mlpwo": "offload", "pipeline_remat_iterations": 192, "pipeline_remat_tensors": "moe_x_sorted"},
        kept_without=_EXPERTS_KEPT,
    ),
    "mixtral-8x7b-8-parts": Shape(
        title="Mixtral 8x7B, v5p-64 (32 chips), expert 4 × FSDP 8, 16 sequences of 2048 per chip in 8 parts",
        keys=_MIXTRAL_OVER_32 | {"num_pipeline_microbatches": 1} | _IN_8_PARTS,
        kept=_EXPERTS_KEPT,
    ),
    "llama3-8b-2-slices": Shape(
        title="Llama 3 8B, 2 slices of v6e-256, FSDP 256 within a slice, 4 sequences per chip in 2 parts",
        keys={
            "model_name": "llama3-8b",
            "compile_topology": "v6e-256",
            "compile_topology_num_slices": 2,
            "dcn_data_parallelism": 2,
            "ici_fsdp_parallelism": 256,
            "num_pipeline_microbatches": 2,
            "per_device_batch_size": 4,
            "max_target_length": 4096,
        },
        without={"gradient_accumulation_steps": 2, "per_device_batch_size": 2},
        kept=_ATTENTION_KEPT,
    ),
    "llama3-8b-dcn": Shape(
        title="Llama 3 8B, 4 slices of v6e-16, 4 stages over DCN × FSDP 16",
        keys=_OVER_4_SLICES,
        kept=_ATTENTION_OFFLOADED,
    ),
    "llama3-8b-4-slices": Shape(
        title="The same with 4 repeats of 2 layers per stage; with one stage data parallelism over DCN",
        keys=_OVER_4_SLICES | {"num_layers_per_pipeline_stage": 2},
        one_stage=_REPLICAS_OVER_4_SLICES,
        kept=_KEPT,
    ),
    "llama3-8b-4-slices-delayed": Shape(
        title="The same with delayed forwarding",
        keys=_OVER_4_SLICES | {"num_layers_per_pipeline_stage": 2, "pipeline_delay_activation_forwarding": True},
        one_stage=_REPLICAS_OVER_4_SLICES,
        kept=_KEPT,
    ),
    "llama3-8b-8-slices": Shape(
        title="Llama 3 8B, 8 slices of v6e-8, 8 stages over DCN × FSDP 8, 2 repeats of 2 layers per stage",
        keys={
            "model_name": "llama3-8b",
            "compile_topology": "v6e-8",
            "compile_topology_num_slices": 8,
            "dcn_pipeline_parallelism": 8,
            "ici_fsdp_parallelism": 8,
            "num_layers_per_pipeline_stage": 2,
            "num_pipeline_microbatches": 8,
            "per_device_batch_size": 1,
            "max_target_length": 2048,
        },
        one_stage={"dcn_pipeline_parallelism": 1, "dcn_fsdp_parallelism": 1, "dcn_data_parallelism": 8},
        kept={"remat_policy": "minimal_with_context"},
    ),
    "mixtral-8x7b": Shape(
        title="Mixtral 8x7B, v5p-64 (32 chips), 4 stages × expert 4 × FSDP 2, dense dispatch with a capacity",
        keys=_MIXTRAL | _CAPACITY,
        kept=_EXPERTS_KEPT,
    ),
    "mixtral-8x7b-dropless": Shape(
        title="The same with MaxText's default dispatch: dropless, ragged, Megablox",
        keys=_MIXTRAL,
        kept=_EXPERTS_KEPT,
    ),
    # Sequences of 2048 keep the compilation short. Longer ones need more memory; the rest of the program stays the same.
    "deepseek3-671b-batch-split": Shape(
        title="DeepSeek-V3 671B, v5p-1024 (512 chips), 4 stages × expert 8 × FSDP 16, batch-split schedule",
        preset="deepseek3-671b-batch-split",
        keys=_DEEPSEEK,
    ),
    "deepseek3-671b": Shape(
        title="The same without the batch-split schedule",
        preset="deepseek3-671b-batch-split",
        keys=_DEEPSEEK | {"use_batch_split_schedule": False},
    ),
    # The 58 MoE layers divide by 2 stages. With 4 stages 2 of them are outside the pipeline, and each stage stores them.
    "deepseek3-671b-4096": Shape(
        title="DeepSeek-V3 671B, v5p-1024 (512 chips), 2 stages × expert 8 × FSDP 32, one sequence of 4096 per chip",
        preset="deepseek3-671b-batch-split",
        keys=_DEEPSEEK_4096
        | {
            "ici_pipeline_parallelism": 2,
            "pipeline_parallel_layers": 58,
            "ici_fsdp_parallelism": 32,
            "num_pipeline_microbatches": 2,
        },
        kept=_INPUTS_OFFLOADED,
    ),
    "deepseek3-671b-4096-4-stages": Shape(
        title="DeepSeek-V3 671B, v5p-1024 (512 chips), 4 stages × expert 8 × FSDP 16, one sequence of 4096 per chip",
        preset="deepseek3-671b-batch-split",
        keys=_DEEPSEEK_4096,
    ),
    # In two parts, with the layers' inputs on the host: on the device they do not fit.
    "deepseek3-671b-4-sequences": Shape(
        title="DeepSeek-V3 671B, v5p-512 (256 chips), expert 4 × FSDP 64, four sequences of 4096 per chip in 2 parts",
        keys={
            "model_name": "deepseek3-671b",
            "compile_topology": "v5p-512",
            "allow_split_physical_axes": True,
            "ici_expert_parallelism": 4,
            "ici_fsdp_parallelism": 64,
            "num_pipeline_microbatches": 2,
            "per_device_batch_size": 4,
            "max_target_length": 4096,
            "remat_policy": "custom",
            "decoder_layer_input": "offload",
            "num_vocab_tiling": 8,
        },
    ),
    # The model's 94 layers do not divide by 4 stages: 92 are in the pipeline.
    "qwen3-235b-a22b": Shape(
        title="Qwen3 235B-A22B, v5p-256 (128 chips), 4 stages × expert 4 × FSDP 8",
        keys={
            "model_name": "qwen3-235b-a22b",
            "compile_topology": "v5p-256",
            "ici_pipeline_parallelism": 4,
            "pipeline_parallel_layers": 92,
            "ici_expert_parallelism": 4,
            "ici_fsdp_parallelism": 8,
            "num_pipeline_microbatches": 8,
            "per_device_batch_size": 2,
            "max_target_length": 4096,
        },
        kept=_ATTENTION_KEPT,
    ),
    # Local and global attention take turns, so a stage has two layers.
    "gpt-oss-120b": Shape(
        title="gpt-oss-120b, v5p-128 (64 chips), 2 stages × expert 8 × FSDP 4",
        keys={
            "model_name": "gpt-oss-120b",
            "compile_topology": "v5p-128",
            "allow_split_physical_axes": True,
            "ici_pipeline_parallelism": 2,
            "num_layers_per_pipeline_stage": 2,
            "ici_expert_parallelism": 8,
            "ici_fsdp_parallelism": 4,
            "num_pipeline_microbatches": 4,
            "per_device_batch_size": 2,
            "max_target_length": 4096,
        },
        kept=_ATTENTION_KEPT,
    ),
    # Each fourth layer has no RoPE, so a stage has four layers.
    "llama4-17b-16e": Shape(
        title="Llama 4 Scout (17B, 16 experts), v5p-128 (64 chips), 4 stages × expert 4 × FSDP 4",
        keys={
            "model_name": "llama4-17b-16e",
            "compile_topology": "v5p-128",
            "ici_pipeline_parallelism": 4,
            "num_layers_per_pipeline_stage": 4,
            "ici_expert_parallelism": 4,
            "ici_fsdp_parallelism": 4,
            "num_pipeline_microbatches": 8,
            "per_device_batch_size": 2,
            "max_target_length": 4096,
        },
        kept=_INPUTS_OFFLOADED,
    ),
    # A v6e whose SparseCores run collectives, so that overlap can be read off the schedule.
    "llama3-8b-v6e": Shape(
        title="Llama 3 8B, v6e-64, 4 stages × FSDP 16",
        keys={
            "model_name": "llama3-8b",
            "compile_topology": "v6e-64",
            "allow_split_physical_axes": True,
            "ici_pipeline_parallelism": 4,
            "ici_fsdp_parallelism": 16,
            "num_pipeline_microbatches": 8,
            "per_device_batch_size": 2,
            "max_target_length": 4096,
        },
        kept=_KEPT,
    ),
}

# {name of a row: its name in `maxtext-pp compare`}. `--impl` also takes the names of rows with - instead of spaces.
IMPLEMENTATIONS: dict[str, str] = {
    "none": variants.NONE,
    "window": variants.WINDOW,
    PLAIN: "host",
    "host BSW": "host-bsw",
    "host ag_once": "host-ag-once",
    "circular": "circular",
    "circular_bsw": "circular_bsw",
    "circular_ag_once": "circular_ag_once",
}


def implementation(name: str) -> str:
  """The row's name for a name on a command line, such as `host-plain`. Raises ValueError with the choices."""
  for known in IMPLEMENTATIONS:
    if name.replace("-", " ").casefold() == known.casefold():
      return known
  choices = ", ".join(known.replace(" ", "-") for known in IMPLEMENTATIONS)
  raise ValueError(f"unknown implementation {name!r}; choose from {choices}")


def row_name(impl: str, *, keeps: bool, sets: Sequence[str] = (), without: Sequence[str] = ()) -> str:
  """The name of a row: an implementation, whether it keeps activations, sets of XLA flags, flags of these left out."""
  return ", ".join([impl, *([KEEPS] if keeps else []), *sets, *(f"without {flag}" for flag in without)])


def implementation_of(row: str) -> str:
  """The implementation of a row."""
  return row.partition(", ")[0]


def keeps(row: str) -> bool:
  """Whether a row keeps activations: the policy is its shape's `kept`."""
  return KEEPS in row.split(", ")


def has_flags(row: str) -> bool:
  """Whether a row has sets of XLA flags."""
  return row != row_name(implementation_of(row), keeps=keeps(row))


def arguments(shape: Shape, impl: str, extra: Mapping[str, object] | None = None, *, keeps: bool = False) -> list[str]:
  """MaxText's command-line arguments for a shape and an implementation; a preset's name comes first."""
  without = impl == variants.NONE
  kept = (without and shape.kept_without or shape.kept) if keeps else {}
  keys = {**COMMON, **shape.keys, **(shape.without if without else {}), **kept, **(extra or {})}
  keys |= variants.keys(IMPLEMENTATIONS[impl], keys)
  if impl in (variants.NONE, variants.WINDOW):
    keys |= shape.one_stage
  return [*filter(None, [shape.preset]), *(f"{key}={value}" for key, value in keys.items())]

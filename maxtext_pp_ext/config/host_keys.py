# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""MaxText's keys that this package reads, with the types of their values after MaxText has derived and validated them.

A MaxText whose config lacks one of them is refused (`host.patch_points.table`). Rules read with `getattr` what only later
versions have. Enums are strings here; `config.view.plain` converts them.
"""

from collections.abc import Sequence
from typing import Any, Protocol


class HostKeys(Protocol):
  """A config of MaxText's, or anything with its keys: pydantic model, `HyperParameters`, `ConfigView`, plain object."""

  # Pipeline.
  ici_pipeline_parallelism: int
  dcn_pipeline_parallelism: int
  num_layers_per_pipeline_stage: int
  num_pipeline_repeats: int
  pipeline_parallel_layers: int
  num_pipeline_microbatches: int
  pipeline_delay_activation_forwarding: bool
  pipeline_fsdp_ag_once: bool
  pipeline_fsdp_ag_per_repeat: bool
  using_pipeline_parallelism: bool
  scan_layers_per_stage: bool
  scan_pipeline_iterations: bool
  scan_pipeline_repeats: bool
  set_remat_policy_on_layers_per_stage: bool
  set_remat_policy_on_pipeline_iterations: bool
  remat_policy: str | None
  decoder_layer_input: str
  tensors_on_device: Sequence[str] | None
  tensors_to_offload: Sequence[str] | None

  # Model.
  model_name: str
  decoder_block: str
  num_decoder_layers: int | None
  first_num_dense_layers: int
  scan_layers: bool
  param_scan_axis: int
  inhomogeneous_layer_cycle_interval: int
  nope_layer_interval: int
  interleave_moe_layer_step: int
  emb_dim: int | None
  mlp_dim: int | None
  head_dim: int
  num_query_heads: int | None
  num_kv_heads: int | None
  vocab_size: int
  num_vocab_tiling: int
  attention: str
  rope_type: str
  fused_qkv: bool
  engram_layers: Sequence[int]
  mhc_expansion_rate: int
  mtp_num_layers: int
  use_multimodal: bool
  use_mrope: bool
  deepstack_visual_indexes_for_vit: Sequence[int]
  indexer_loss_scaling_factor: float
  dtype: str
  weight_dtype: str
  lora: Any
  use_m3_model: bool
  use_lineage: bool
  sa_block_q: int

  # Experts.
  num_experts: int
  num_experts_per_tok: int
  moe_mlp_dim: int | None
  capacity_factor: float
  sparse_matmul: bool
  shared_experts: int
  mlp_bias: bool
  use_ring_of_experts: bool
  ragged_buffer_factor: float
  shard_exp_on_fsdp: bool
  use_2d_fsdp_sharding: bool
  load_balance_loss_weight: float
  routed_bias: bool
  routed_bias_update_rate: float
  use_batch_split_schedule: bool
  te_moe_block: bool
  moe_dropless_fallback: str | None
  defer_small_all_reduces: bool
  batch_split_factor: int

  # Quantization.
  quantization: str | None
  quantization_local_shard_count: int
  use_qwix_quantization: bool

  # Batches.
  global_batch_size_to_train_on: int | None
  micro_batch_size_to_train_on: int | None
  per_device_batch_size: float
  gradient_accumulation_steps: int
  max_target_length: int
  eval_interval: int
  eval_per_device_batch_size: float
  micro_batch_size_to_eval_on: int | None
  enable_rampup_batch_size: bool
  per_device_batch_size_start: float
  per_device_batch_size_increment: float

  # Devices and sharding.
  num_target_devices: int | None
  num_slices: int
  ici_parallelism: Sequence[int] | None
  dcn_parallelism: Sequence[int] | None
  ici_expert_parallelism: int
  dcn_expert_parallelism: int
  ici_fsdp_parallelism: int
  ici_data_parallelism: int
  mesh_axes: Sequence[str]
  logical_axis_rules: Sequence[Any]
  input_data_sharding_logical_axes: Sequence[str]
  custom_mesh: str
  custom_mesh_and_rule: str
  custom_mesh_and_rule_for_eval: str
  allow_split_physical_axes: bool
  context_sharding: str
  shard_mode: str
  compile_topology: str
  compile_xla_flags: str
  internal_compile: bool
  inference_benchmark_test: bool
  parameter_memory_host_offload: bool

  # Training.
  opt_type: str
  mu_dtype: str
  adamw_mask: Sequence[str]
  trainable_parameters_mask: Sequence[str]
  use_qk_clip: bool
  distill_beta: float
  enable_diloco: bool
  record_internal_nn_metrics: int

  # Checkpoints.
  enable_checkpointing: bool
  enable_emergency_checkpoint: bool
  enable_multi_tier_checkpointing: bool
  mtc_data_parallelism: int
  load_parameters_path: str
  run_name: str
  base_output_directory: str
  local_checkpoint_directory: str


REQUIRED = tuple(HostKeys.__annotations__)

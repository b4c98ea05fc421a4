# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The configurations of the trial, drawn by a seed.

Each belongs to an area, which decides what it is about. On top come a few options of other areas.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
import itertools
import random

from maxtext.configs.types import RematPolicy

from tests.parity import blocks
from tests.trial.configuration import Configuration, DEVICES, Draft

Area = Callable[[Draft], None]


def _sizes(d: Draft) -> None:
  d.stages = d.one_of(2, 2, 2, 4, 4) if not d.axes else 2
  d.repeats = d.one_of(1, 2, 2, 3, 4)
  d.per_stage = d.one_of(1, 1, 2)
  d.rounds = d.one_of(1, 2, 2, 4) if d.stages == 2 else d.one_of(1, 2)
  d.rows = d.one_of(1, 2, 2, 4)


def _dense_model(d: Draft) -> None:
  d.model(d.one_of("llama2", "llama2", "mistral", "qwen3", "gemma2", "gpt3", "qwen2", "gemma"))


def _any_model(d: Draft) -> None:
  d.model(
      d.one_of(
          *("llama2", "mixtral", "qwen3_moe", "deepseek", "deepseek: with an indexer"),
          *("gemma2", f"gpt_oss: {blocks.CYCLE}", f"llama4: {blocks.CYCLE}", f"olmo3: {blocks.CYCLE}"),
      )
  )


# Sizes of two mesh axes beside 2 stages.
_THREE_AXES = [
    {"ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 2},
    {"ici_fsdp_parallelism": 2, "ici_expert_parallelism": 2},
    {"ici_fsdp_parallelism": 2, "ici_context_parallelism": 2},
    {"ici_fsdp_parallelism": 2, "ici_tensor_sequence_parallelism": 2},
    {"ici_fsdp_parallelism": 2, "ici_fsdp_transpose_parallelism": 2},
    {"ici_fsdp_parallelism": 2, "ici_data_parallelism": 2},
    {"ici_fsdp_parallelism": 1, "ici_tensor_parallelism": 2, "ici_expert_parallelism": 2},
    {"ici_fsdp_parallelism": 1, "ici_tensor_parallelism": 2, "ici_context_parallelism": 2},
    {"ici_fsdp_parallelism": 1, "ici_context_parallelism": 2, "ici_expert_parallelism": 2},
    {"ici_fsdp_parallelism": 1, "ici_context_usp_ulysses_parallelism": 2, "ici_data_parallelism": 2},
]


def meshes(d: Draft) -> None:
  """Three mesh axes."""
  d.one_of(_any_model, _dense_model)(d)
  d.axes = dict(d.one_of(*_THREE_AXES))
  _sizes(d)
  d.rows = d.one_of(2, 4)
  if "ici_context_parallelism" in d.axes:
    # MaxText's GPT-3 (0.2.5) gives its attention no positions, so that tokens in another order see later ones.
    d.either(context_parallel_load_balance=d.one_of(True, False) and d.keys["decoder_block"] != "gpt3")


def experts(d: Draft) -> None:
  """Sparse experts, experts with a capacity, and an axis of experts."""
  d.model(d.one_of("mixtral", "qwen3_moe", "deepseek", f"gpt_oss: {blocks.CYCLE}"))
  d.axes = dict(d.one_of({"ici_expert_parallelism": 2}, {"ici_expert_parallelism": 4}, {"ici_tensor_parallelism": 2}, {}))
  _sizes(d)
  kinds = ("sparse", "sparse", "capacity", "dense") if d.keys["decoder_block"] != "gpt_oss" else ("sparse", "dense")
  kind = d.one_of(*kinds)
  if kind == "sparse":
    d.rows = d.one_of(4, 8)
    d.either(sparse_matmul=True, megablox=False, load_balance_loss_weight=0.0)
    # CPU devices have no ragged all-to-all.
    d.either(use_ring_of_experts="ici_expert_parallelism" in d.axes, use_ragged_sort=d.one_of(False, False, True))
  elif kind == "capacity":
    d.either(capacity_factor=d.one_of(0.5, 1.0, 1.5))
  d.either(routed_scaling_factor=d.one_of(1.0, 2.5), norm_topk_prob=d.one_of(True, False))


def slices(d: Draft) -> None:
  """Stages, FSDP and data parallelism over slices."""
  _any_model(d)
  d.axes = {"num_slices": 2}
  d.axes |= d.one_of(
      {"dcn_pipeline_parallelism": 2, "dcn_data_parallelism": 1, "ici_fsdp_parallelism": 4},
      {"dcn_pipeline_parallelism": 2, "dcn_data_parallelism": 1, "ici_tensor_parallelism": 2},
      {"dcn_pipeline_parallelism": 2, "dcn_data_parallelism": 1, "ici_pipeline_parallelism": 2},
      {"dcn_fsdp_parallelism": 2, "dcn_data_parallelism": 1, "ici_fsdp_parallelism": 2},
      {"dcn_data_parallelism": 2, "ici_fsdp_parallelism": 2},
      {"dcn_data_parallelism": 2, "ici_expert_parallelism": 2},
  )
  _sizes(d)
  if d.axes.get("ici_pipeline_parallelism") == 2:
    d.stages = 4
  if d.numbers.random() < 0.2 and "dcn_pipeline_parallelism" not in d.axes:
    d.stages, d.axes["ici_fsdp_parallelism"] = 1, 4


def replicas(d: Draft) -> None:
  """DiLoCo."""
  _any_model(d)
  d.stages, d.repeats, d.per_stage = d.one_of(1, 2), d.one_of(2, 3), 1
  d.rounds, d.rows = d.one_of(2, 4), d.one_of(4, 8)
  d.either(enable_diloco=True, diloco_sync_period=2, eval_interval=-1, steps=3)
  both = d.one_of(
      {"ici_diloco_parallelism": 2}, {"num_slices": 2, "dcn_diloco_parallelism": 2, "dcn_data_parallelism": 1}
  )
  d.either(**both)
  d.axes = {"ici_fsdp_parallelism": 2} if d.stages == 2 else {"ici_fsdp_parallelism": 4}
  d.reference, d.on_one_device = {"ici_fsdp_parallelism": 4}, False


_POLICIES = [policy.value for policy in RematPolicy]
_NAMES = [
    *("decoder_layer_input", "context", "mlpwi", "mlpwi_0", "mlpwi_1", "mlpwo", "moe_mlpwi_0", "moe_mlpwo"),
    *("query_proj", "key_proj", "value_proj", "qkv_proj", "out_proj", "mla_q", "mla_kv", "attention_out"),
]


def _remat(d: Draft) -> None:
  policy = d.one_of(*_POLICIES, "custom", "custom")
  d.pipeline["remat_policy"] = policy
  if policy == "custom":
    for name in d.numbers.sample(_NAMES, 5):
      places = ("device", "offload") if name == "decoder_layer_input" else ("device", "offload", "remat")
      d.pipeline[name] = d.one_of(*places)
  d.pipeline["set_remat_policy_on_layers_per_stage"] = d.one_of(False, False, True)


def remat(d: Draft) -> None:
  """All remat policies, also those that offload."""
  _any_model(d)
  _sizes(d)
  if d.numbers.random() < 0.2:
    d.stages = 1
  _remat(d)
  if d.stages == 1:
    d.pipeline.pop("set_remat_policy_on_layers_per_stage")


def windows(d: Draft) -> None:
  """One stage, blocks of cycles."""
  d.model(
      d.one_of(
          *(f"llama4: {blocks.CYCLE}", f"olmo3: {blocks.CYCLE}", f"gpt_oss: {blocks.CYCLE}"),
          *("gemma3: scan_layers, a multiple of 6 layers in a stage", f"qwen3_next: {blocks.CYCLE}", "gemma4"),
      )
  )
  d.stages, d.repeats, d.rounds, d.rows = 1, d.one_of(1, 2), d.one_of(1, 2, 4, 4), d.one_of(2, 4, 8)
  if "gemma" in d.keys["decoder_block"]:
    d.outside = d.one_of(0, 1)  # of others MaxText drops layers that do not fill a cycle
  d.axes = dict(d.one_of({}, {}, {"ici_tensor_parallelism": 2}, {"ici_expert_parallelism": 2, "ici_data_parallelism": 2}))


def biases(d: Draft) -> None:
  """DeepSeek: expert biases, load-balance losses, multi-token prediction, gradient accumulation."""
  d.model("deepseek")
  d.either(model_name="deepseek3-tiny", override_model_config=True)
  d.stages, d.repeats, d.rounds = d.one_of(1, 2, 2), d.one_of(1, 2, 3), d.one_of(1, 2)
  d.either(gradient_accumulation_steps=d.one_of(1, 2, 3), mtp_num_layers=d.one_of(0, 1, 2), mtp_loss_scaling_factor=0.3)
  d.either(routed_bias_update_rate=d.one_of(0.01, 0.05), load_balance_loss_weight=d.one_of(0.0, 0.1))
  d.per_stage = d.one_of(1, 1, 2) if d.stages > 1 else 1


def _optimizer(d: Draft) -> None:
  kind = d.one_of("adamw", "adamw", "sgd", "adam_pax", "muon")
  d.either(opt_type=kind)
  if kind == "adamw":
    d.either(mu_dtype=d.one_of("float32", "bfloat16"), adam_weight_decay=d.one_of(0.0, 0.1))
  d.either(gradient_clipping_threshold=d.one_of(0.0, 0.05, 1.0))
  d.either(
      **d.one_of(
          {},
          {},
          {"skip_step_on_spikes": True},
          {"optimizer_memory_host_offload": True},
          {"shard_optimizer_over_data": True},
          {"use_tunix_gradient_accumulation": True, "gradient_accumulation_steps": 2},
          {"grad_dtype": "bfloat16"},
      )
  )


def optimizers(d: Draft) -> None:
  """Optimizers, clipping, offloading of their state."""
  _any_model(d)
  _sizes(d)
  _optimizer(d)


def quantization(d: Draft) -> None:
  """Quantized layers."""
  d.model(d.one_of("llama2", "mixtral", "qwen3", "gemma2"))
  d.either(quantization=d.one_of("fp8", "fp8", "nanoo_fp8", "int8", "fp8_full"))
  d.either(use_qwix_quantization=d.one_of(False, False, True))
  d.stages, d.rounds, d.rows = d.one_of(1, 2, 4), d.one_of(1, 2), d.one_of(2, 4)
  d.repeats = d.one_of(1, 2)


def shapes(d: Draft) -> None:
  """Layers outside of the pipeline, scanned layers of a stage, delay, many microbatches and repeats."""
  _any_model(d)
  _sizes(d)
  d.per_stage, d.rows = d.one_of(1, 2, 3), d.one_of(1, 2)
  d.outside = d.one_of(0, 1, 2) * d.cycle
  if d.keys.get("routed_bias_update_rate"):
    d.outside = 0
  else:
    d.pipeline["scan_layers_per_stage"] = d.per_stage * d.cycle > 1 and d.one_of(True, False)
  if d.stages * d.rounds <= 4:
    d.pipeline["scan_pipeline_iterations"] = d.one_of(True, False)
  if d.one_of(True, False):
    d.pipeline["pipeline_delay_activation_forwarding"] = True
    d.rounds = max(d.rounds, 2)
  if d.cycle == 1 and d.one_of(True, False, False):
    d.either(scan_layers=False)


def _dtypes(d: Draft) -> None:
  d.pipeline["pipeline_grad_accum_dtype"] = d.one_of("auto", "float32", "bfloat16")
  d.pipeline["pipeline_gather_dtype"] = d.one_of("auto", "weight", "compute")
  d.either(dtype=d.one_of("float32", "bfloat16"), weight_dtype=d.one_of("float32", "float32", "bfloat16"))


def dtypes(d: Draft) -> None:
  """Types of numbers."""
  _dense_model(d)
  _sizes(d)
  _dtypes(d)


def _around(d: Draft) -> None:
  d.either(**d.one_of({"logits_via_embedding": True}, {"logits_via_embedding": False}, {"num_vocab_tiling": 4}))
  d.either(**d.one_of({"z_loss_multiplier": 1e-2}, {"mtp_num_layers": 1}, {"final_logits_soft_cap": 5.0}, {}))
  d.either(**d.one_of({"normalize_embedding_logits": False}, {"logits_dot_in_fp32": True}, {"use_iota_embed": True}, {}))
  d.either(param_scan_axis=d.one_of(0, 1))
  d.pipeline["shard_mode"] = d.one_of("auto", "auto", "auto", "explicit")


def around(d: Draft) -> None:
  """What surrounds the layers: embeddings, losses, explicit sharding, the axis of scans."""
  _any_model(d)
  _sizes(d)
  _around(d)


def evaluation(d: Draft) -> None:
  """Evaluations with another batch."""
  _any_model(d)
  _sizes(d)
  batch = d.rows * (d.stages * d.rounds if d.stages > 1 else d.rounds) / DEVICES
  d.either(eval_per_device_batch_size=batch * d.one_of(0.5, 2, 3), eval_steps=2)
  d.either(**d.one_of({}, {"gradient_accumulation_steps": 2}, {"moe_dropless_fallback": None}))
  d.keys.pop("moe_dropless_fallback", None)


def nan(d: Draft) -> None:
  """One row meets a NaN."""
  _any_model(d)
  _sizes(d)
  d.either(steps=1, eval_interval=-1, gradient_clipping_threshold=0.0, load_balance_loss_weight=0.0)
  d.nan_row = d.numbers.randrange(d.rows * d.stages * d.rounds)


def dropout(d: Draft) -> None:
  """Layers drop; means over steps agree."""
  d.model(d.one_of("llama2", "gemma2", "mistral"))
  _sizes(d)
  d.rows, d.most = 1, 4
  d.either(dropout_rate=0.2, enable_dropout=True, steps=60, learning_rate=1e-30, eval_interval=-1, adam_weight_decay=0.0)
  d.either(reuse_example_batch=1)
  # MaxText's scanned layers (0.2.5) drop the same in every step: `_apply_layers_sequentially` does not keep their random
  # counters. A mean over steps would be that of one draw.
  d.reference = {"scan_layers": False}
  d.dropout = True


AREAS: dict[str, Area] = {
    area.__name__: area
    for area in (
        *(meshes, experts, slices, biases, windows, remat, optimizers, shapes, around),
        *(quantization, dtypes, replicas, evaluation, nan, dropout),
    )
}


def _accumulation(d: Draft) -> None:
  d.either(gradient_accumulation_steps=2)


def _explicit(d: Draft) -> None:
  d.pipeline["shard_mode"] = "explicit"


_OPTIONS: list[Callable[[Draft], None]] = [_remat, _around, _optimizer, _dtypes, _accumulation, _explicit]
_ALONE = ("nan", "dropout")  # areas without options of others


def draw(seed: int, count: int, only: Collection[str] = ()) -> Iterator[Configuration]:
  """The configurations of a seed, from the first on; `only` those of some areas, or of some names."""
  areas = [name for name in AREAS if not only or name in only or any(each.startswith(f"{name}-") for each in only)]
  for number, name in itertools.islice(((n, a) for n in itertools.count() for a in areas), count):
    drawn = Draft(numbers=random.Random(f"{seed} {name} {number}"))
    AREAS[name](drawn)
    if name not in _ALONE:
      for option in drawn.numbers.sample(_OPTIONS, drawn.one_of(0, 1, 1, 2)):
        before = dict(drawn.keys), dict(drawn.pipeline)
        option(drawn)
        drawn.keys |= before[0]
        drawn.pipeline |= before[1]
      if drawn.has_experts or drawn.keys.get("quantization"):
        # Rounded to bfloat16, tokens would go to other experts, and values to other steps.
        drawn.keys |= {"dtype": "float32", "weight_dtype": "float32"}
        if drawn.pipeline.get("pipeline_grad_accum_dtype") == "bfloat16":
          drawn.pipeline["pipeline_grad_accum_dtype"] = "float32"
    found = drawn.finished(f"{name}-{seed}-{number}")
    if not only or name in only or found.name in only:
      yield found

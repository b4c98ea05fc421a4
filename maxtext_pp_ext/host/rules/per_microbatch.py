# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Refuses layer computations over all rows of a call if their result for microbatches differs from that for the batch.

A pipeline calls layers with one microbatch, for all stages at once, also in bubbles. Values of a single row, and sums and
means over rows, stay correct. The values refused here do not. Read in MaxText 0.2.5.
"""

from collections.abc import Iterator
import math

from maxtext_pp_ext.config import derived
from maxtext_pp_ext.config.host_keys import HostKeys
from maxtext_pp_ext.config.view import plain
from maxtext_pp_ext.host.rules import pipelined_path, rows

_EXPERTS = dict.fromkeys(
    ("moe_log_max_load_ratio", "log_required_ragged_buffer_factor"),
    "MaxText takes the maximum over all mesh axes, so a layer would report that of other stages and bubbles.",
)
_EXPERTS_OF_TE = {
    "te_moe_block": (
        "Transformer Engine's experts size their buffers for a call with all rows, but a pipeline calls layers with one "
        "microbatch."
    ),
}


def problems(config: HostKeys) -> Iterator[str]:
  """Yields a problem for each value that a pipeline would compute per microbatch, not per batch."""
  # The batch-split schedule has a rule of its own.
  yield from pipelined_path.features(config, _EXPERTS if config.use_batch_split_schedule else _EXPERTS | _EXPERTS_OF_TE)
  if config.moe_dropless_fallback == "layer":
    yield (
        "moe_dropless_fallback=layer: MaxText sums over all mesh axes whether a layer falls back, so the layers of "
        "all stages would fall back together, and bubbles would count. Set moe_dropless_fallback=step."
    )
  if config.moe_dropless_fallback is None:  # otherwise what dropped tokens is computed again
    yield from _buffers(config)
  # With compressed attention the loss is a mean over tokens that see a compressed span; with MLA it is over all.
  factor = getattr(config, "indexer_loss_scaling_factor", 0)
  compressed = plain(getattr(config, "attention_type", "")) == "compressed"
  if factor > 0 and compressed and getattr(config, "use_indexer", False):
    yield (
        f"indexer_loss_scaling_factor={factor} with attention_type=compressed: MaxText's loss is a mean over the tokens "
        "of a call that see a compressed span. Microbatches have different numbers of them, so the mean of their losses "
        "is not the batch's. Set indexer_loss_scaling_factor=0, or without a pipeline num_pipeline_microbatches=1."
    )
  batch, microbatches = config.micro_batch_size_to_train_on, config.num_pipeline_microbatches
  # With DiLoCo, one call of a pipeline has the rows of one replica.
  replicas = getattr(config, "num_diloco_replicas", None) if config.enable_diloco else None
  if replicas and batch and microbatches > 0 and batch % (replicas * microbatches):
    yield (
        f"enable_diloco=True: each of {replicas} replicas has {batch // replicas} of the batch's {batch} rows, which "
        f"cannot be divided into num_pipeline_microbatches={microbatches} microbatches. Set per_device_batch_size so "
        f"that the batch is a multiple of {replicas * microbatches} rows."
    )
  if config.use_qk_clip and config.gradient_accumulation_steps > 1:
    yield (
        f"use_qk_clip=True with gradient_accumulation_steps={config.gradient_accumulation_steps}: MaxText adds up the "
        "largest logits of each row, and clips by the largest sum. A pipeline has the largest logit of each "
        "microbatch, and would clip more. Set gradient_accumulation_steps=1 and a larger num_pipeline_microbatches."
    )


def _buffers(config: HostKeys) -> Iterator[str]:
  """Buffers hold the tokens of one call, and drop those that do not fit."""
  for key in ("ragged_buffer_factor", "eval_ragged_buffer_factor"):
    value, of_evaluation = getattr(config, key, -1.0), key.startswith("eval")
    if value <= 0 or _has_room_for_all(config, value) or (of_evaluation and config.eval_interval <= 0):
      continue
    remedies = [f"{key}=-1"]
    if of_evaluation:
      remedies.append("eval_interval=-1")
    elif getattr(config, "use_ring_of_experts", False) and getattr(config, "use_ragged_sort", False):
      remedies.append("moe_dropless_fallback=step")  # MaxText has it for these only
    yield (
        f"{key}={value}: this limits how many tokens of one call a buffer holds. In a pipeline one call has one "
        f"microbatch, so other tokens would be dropped than without a pipeline. Set {' or '.join(remedies)}."
    )


def _has_room_for_all(config: HostKeys, factor: float) -> bool:
  """Whether a buffer `factor` times as large as balanced experts need also holds the tokens of unbalanced ones."""
  if (mesh := derived.mesh_shape(config)) is None or not config.num_experts_per_tok:
    return True  # not known (yet); another rule reports that
  devices = math.prod(mesh.get(axis, 1) for axis in rows.expert_axes(config))
  return factor >= min(devices, config.num_experts / config.num_experts_per_tok)

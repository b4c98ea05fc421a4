# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""What a layer of MaxText computes of all rows that it is called with, and is not the same of a microbatch's.

A pipeline calls layers with a microbatch, for all stages at once, in bubbles as well. What is a sum or mean over rows, or
belongs to a row, is right then. What is refused here is not. Read in MaxText 0.2.5; 0.2.4 has fewer of these keys.
"""

from __future__ import annotations

from collections.abc import Iterator
import math

from maxtext_pp_ext.config import derived
from maxtext_pp_ext.config.host_keys import HostKeys
from maxtext_pp_ext.host.rules import rows

_OVER_ALL_DEVICES = (
    "MaxText takes the maximum over all axes of the mesh, so that a layer would report that of other stages, "
)
_OVER_ALL_DEVICES += "and of bubbles"
# Keys that have to be False, and what is wrong if they are True.
_MOE = {
    "moe_log_max_load_ratio": _OVER_ALL_DEVICES,
    "log_required_ragged_buffer_factor": _OVER_ALL_DEVICES,
    "te_moe_block": (
        "buffers of Transformer Engine's experts are made for a call with all rows, and a pipeline calls layers with a "
        "microbatch"
    ),
}


def problems(config: HostKeys) -> list[str]:
  """Everything in a config that a pipeline would compute of microbatches instead of the batch; [] if nothing."""
  return [*_experts(config), *_buffers(config), *_replicas(config), *_accumulation(config)]


def _experts(config: HostKeys) -> Iterator[str]:
  for key, reason in _MOE.items():
    if getattr(config, key, False) and not (key == "te_moe_block" and config.use_batch_split_schedule):
      yield f"{key}=True: {reason}. Set {key}=False."
  if getattr(config, "moe_dropless_fallback", None) == "layer":
    yield (
        "moe_dropless_fallback=layer: MaxText adds up over all axes of the mesh whether a layer falls back, so that the "
        "layers of all stages would, and bubbles count. Set moe_dropless_fallback=step."
    )


def _buffers(config: HostKeys) -> Iterator[str]:
  """Buffers for the tokens of one call, which drop those that they have no room for."""
  if getattr(config, "moe_dropless_fallback", None) is not None:
    return  # which computes again what has dropped tokens
  for key in ("ragged_buffer_factor", "eval_ragged_buffer_factor"):
    value, of_evaluation = getattr(config, key, -1.0), key.startswith("eval")
    if value <= 0 or _has_room_for_all(config, value) or (of_evaluation and config.eval_interval <= 0):
      continue
    ways = [f"{key}=-1"]
    if of_evaluation:
      ways.append("eval_interval=-1")
    elif getattr(config, "use_ring_of_experts", False) and getattr(config, "use_ragged_sort", False):
      ways.append("moe_dropless_fallback=step")  # which MaxText has for these only
    yield (
        f"{key}={value}: a buffer has room for so many tokens of one call, which in a pipeline are a microbatch's, so "
        f"that other tokens are dropped than without a pipeline. Set {' or '.join(ways)}."
    )


def _has_room_for_all(config: HostKeys, factor: float) -> bool:
  """Whether a buffer that is so many times as large as balanced experts need takes the tokens of any others."""
  mesh = derived.mesh_shape(config)
  if mesh is None or not config.num_experts_per_tok:
    return True  # not known (yet), which is an error of its own
  devices = math.prod(mesh.get(axis, 1) for axis in rows.expert_axes(config))
  return factor >= min(devices, config.num_experts / config.num_experts_per_tok)


def _replicas(config: HostKeys) -> Iterator[str]:
  """With DiLoCo a pipeline is called with the rows of one replica."""
  batch, microbatches = config.micro_batch_size_to_train_on, config.num_pipeline_microbatches
  replicas = getattr(config, "num_diloco_replicas", None) if config.enable_diloco else None
  if replicas and batch and microbatches > 0 and batch % (replicas * microbatches):
    yield (
        f"enable_diloco=True: each of {replicas} replicas has {batch // replicas} of the batch's {batch} rows, which "
        f"cannot be divided into num_pipeline_microbatches={microbatches} microbatches. Set per_device_batch_size so "
        f"that the batch is a multiple of {replicas * microbatches} rows."
    )


def _accumulation(config: HostKeys) -> Iterator[str]:
  """MaxText adds up over the steps of an accumulation what layers have sown, row by row."""
  if config.use_qk_clip and config.gradient_accumulation_steps > 1:
    yield (
        f"use_qk_clip=True with gradient_accumulation_steps={config.gradient_accumulation_steps}: MaxText adds up the "
        "largest logits of each row, and clips by the largest sum. A pipeline has the largest logit of a microbatch's "
        "rows, and would clip more. Set gradient_accumulation_steps=1, and num_pipeline_microbatches to more."
    )

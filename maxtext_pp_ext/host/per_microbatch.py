# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""What a layer of MaxText computes of all rows that it is called with, and is not the same of a microbatch's.

A pipeline calls layers with a microbatch, for all stages at once, in bubbles as well. What is a sum or mean over rows, or
belongs to a row, is right then. What is refused here is not. Read in MaxText 0.2.5; 0.2.4 has fewer of these keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

# Host key -> the value that goes, what is wrong with others.
_MOE = {
    "moe_log_max_load_ratio": (
        False,
        "MaxText takes the maximum over all axes of the mesh, so that a layer would report that of other stages, and of "
        "bubbles",
    ),
    "log_required_ragged_buffer_factor": (
        False,
        "MaxText takes the maximum over all axes of the mesh, so that a layer would report that of other stages, and of "
        "bubbles",
    ),
    "te_moe_block": (
        False,
        "buffers of Transformer Engine's experts are made for a call with all rows, and a pipeline calls layers with a "
        "microbatch",
    ),
}
_BUFFERS = ("ragged_buffer_factor", "eval_ragged_buffer_factor")


def problems(config: Any) -> list[str]:
  """Everything in a config that a pipeline would compute of microbatches instead of the batch; [] if nothing."""
  return [*_experts(config), *_replicas(config), *_accumulation(config)]


def _experts(config: Any) -> Iterator[str]:
  for key, (off, reason) in _MOE.items():
    value = getattr(config, key, off)
    if value != off and not (key == "te_moe_block" and config.use_batch_split_schedule):  # `pipelined_path` has that
      yield f"{key}={value}: {reason}. Set {key}={off}."
  fallback = getattr(config, "moe_dropless_fallback", None)
  if fallback == "layer":
    yield (
        "moe_dropless_fallback=layer: MaxText adds up over all axes of the mesh whether a layer falls back, so that the "
        "layers of all stages would, and bubbles count. Set moe_dropless_fallback=step."
    )
  for key in _BUFFERS:
    value = getattr(config, key, -1.0)
    if value > 0 and fallback is None:
      yield (
          f"{key}={value} without moe_dropless_fallback: a buffer has room for so many tokens of one call, which in a "
          "pipeline are a microbatch's, so that other tokens are dropped than without a pipeline. Set "
          f"moe_dropless_fallback=step, which drops none, or {key}=-1."
      )


def _replicas(config: Any) -> Iterator[str]:
  """With DiLoCo a pipeline is called with the rows of one replica."""
  rows, microbatches = config.micro_batch_size_to_train_on, config.num_pipeline_microbatches
  replicas = getattr(config, "num_diloco_replicas", None) if config.enable_diloco else None
  if replicas and rows and microbatches > 0 and rows % (replicas * microbatches):
    yield (
        f"enable_diloco=True: each of {replicas} replicas has {rows // replicas} of the batch's {rows} rows, which "
        f"cannot be divided into num_pipeline_microbatches={microbatches} microbatches. Set per_device_batch_size so "
        f"that the batch is a multiple of {replicas * microbatches} rows."
    )


def _accumulation(config: Any) -> Iterator[str]:
  """MaxText adds up over the steps of an accumulation what layers have sown, row by row."""
  if config.use_qk_clip and config.gradient_accumulation_steps > 1:
    yield (
        f"use_qk_clip=True with gradient_accumulation_steps={config.gradient_accumulation_steps}: MaxText adds up the "
        "largest logits of each row, and clips by the largest sum. A pipeline has the largest logit of a microbatch's "
        "rows, and would clip more. Set gradient_accumulation_steps=1, and num_pipeline_microbatches to more."
    )

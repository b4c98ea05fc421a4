# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""What of MaxText's quantizations a pipeline cannot do. Read in MaxText 0.2.5."""

from collections.abc import Iterator

from maxtext_pp_ext.config.host_keys import HostKeys
from maxtext_pp_ext.config.remedies import LEAVE_OUT
from maxtext_pp_ext.config.view import plain

# Scales that qwix makes when a layer is first called, and the same operations with scales that a layer is built with.
_SCALES_OF_FIRST_CALL = {"fp8_gpu": "fp8", "fp8_nanoo": "nanoo_fp8"}


def problems(config: HostKeys) -> Iterator[str]:
  """Of what `quantization` names; values that MaxText itself does not train with are left to MaxText."""
  name = plain(config.quantization) or ""
  if name in _SCALES_OF_FIRST_CALL:
    yield (
        f"quantization={name}: qwix makes its scales when a layer is first called, which in a pipeline is where they are "
        f"lost (MaxText's own pipeline fails, too). Set quantization={_SCALES_OF_FIRST_CALL[name]} and "
        "use_qwix_quantization=False for the same operations."
    )
  if name.startswith("te_"):
    yield (
        f"quantization={name}: operations of NVIDIA's Transformer Engine have not been tried in pipelines of "
        f"maxtext-pp-ext. Set quantization=fp8 and use_qwix_quantization=False for fp8 on NVIDIA GPUs. {LEAVE_OUT}"
    )
  if name == "fp8_full" and config.use_qwix_quantization and _scans_layers_of_stages(config):
    yield (
        "quantization=fp8_full with use_qwix_quantization=True and scan_layers_per_stage=True: layers whose scales qwix "
        "makes in two dtypes cannot be scanned over (MaxText's own pipeline fails, too). Set scan_layers_per_stage=False."
    )
  if name == "serve_fp8_weight":
    yield f'quantization={name} is for serving, a pipeline is for training. Set quantization="" or another value.'
  if name == "int8" and not config.use_qwix_quantization:
    yield from _parts_of_microbatch(config)


def _scans_layers_of_stages(config: HostKeys) -> bool:
  return config.scan_layers_per_stage and config.num_layers_per_pipeline_stage > 1


def _parts_of_microbatch(config: HostKeys) -> Iterator[str]:
  """AQT's int8 quantizes a weight's gradient in equal parts of a microbatch, and has a bare assertion for others."""
  batch, microbatches, parts = (
      config.micro_batch_size_to_train_on,
      config.num_pipeline_microbatches,
      config.quantization_local_shard_count,
  )
  if batch is None or batch < 0 or microbatches < 1 or batch % microbatches or parts < 1:
    return
  rows = batch // microbatches
  if rows % parts:
    fitting = max(p for p in range(1, rows + 1) if rows % p == 0 and p <= parts)
    yield (
        f"quantization=int8 divides a microbatch of {rows} rows ({batch} / num_pipeline_microbatches={microbatches}) "
        f"into quantization_local_shard_count={parts} parts (by default the number of local devices), which does not "
        f"divide it. Set quantization_local_shard_count={fitting}, or use_qwix_quantization=True."
    )

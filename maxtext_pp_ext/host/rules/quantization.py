# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Refuses quantizations that pipelines and windows do not support. Read in MaxText 0.2.5."""

from collections.abc import Iterator

from maxtext_pp_ext.config.derived import microbatches_of_window, pipeline_impl, windowed
from maxtext_pp_ext.config.host_keys import HostKeys
from maxtext_pp_ext.config.remedies import LEAVE_OUT
from maxtext_pp_ext.config.view import plain

# Quantization whose scales qwix creates on a layer's first call -> the same operations, with scales built with the layer.
_SCALES_OF_FIRST_CALL = {"fp8_gpu": "fp8", "fp8_nanoo": "nanoo_fp8"}


def problems(config: HostKeys) -> Iterator[str]:
  """Yields the problems with `quantization`. MaxText refuses values that it cannot train with itself."""
  name, impl = plain(config.quantization) or "", pipeline_impl(config)
  if name in _SCALES_OF_FIRST_CALL:
    yield (
        f"quantization={name}: qwix creates its scales on a layer's first call, and pipeline_impl={impl} "
        "loses what that call creates (MaxText's own pipeline fails, too). Set "
        f"quantization={_SCALES_OF_FIRST_CALL[name]} and use_qwix_quantization=False for the same operations."
    )
  if name.startswith("te_"):
    yield (
        f"quantization={name}: NVIDIA Transformer Engine operations are untested with maxtext-pp-ext. "
        f"Set quantization=fp8 and use_qwix_quantization=False for fp8 on NVIDIA GPUs. {LEAVE_OUT}"
    )
  scans_layers_of_stages = config.scan_layers_per_stage and config.num_layers_per_pipeline_stage > 1
  if name == "fp8_full" and config.use_qwix_quantization and scans_layers_of_stages:
    yield (
        "quantization=fp8_full with use_qwix_quantization=True and scan_layers_per_stage=True: qwix creates scales in "
        "two dtypes, and such layers cannot be scanned over (MaxText's own pipeline fails, too). Set "
        "scan_layers_per_stage=False."
    )
  if name == "serve_fp8_weight":
    yield f'quantization={name} is for serving, pipeline_impl={impl} for training. Set quantization="" or another value.'
  if name == "int8" and not config.use_qwix_quantization:
    # AQT quantizes a weight's gradient in equal parts of a microbatch; unequal parts fail a bare assertion.
    batch, parts = config.micro_batch_size_to_train_on, config.quantization_local_shard_count
    microbatches = microbatches_of_window(config) if windowed(config) else config.num_pipeline_microbatches
    if batch is None or batch < 0 or microbatches < 1 or batch % microbatches or parts < 1:
      return
    if (rows := batch // microbatches) % parts:
      fitting = max(p for p in range(1, rows + 1) if rows % p == 0 and p <= parts)
      yield (
          f"quantization=int8 divides a microbatch of {rows} rows ({batch} / num_pipeline_microbatches={microbatches}) "
          f"into quantization_local_shard_count={parts} parts (by default the number of local devices), which does not "
          f"divide the rows. Set quantization_local_shard_count={fitting}, or use_qwix_quantization=True."
      )

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Refuses train-step features that depend on the paths or shapes of parameters, which a pipeline changes (0.2.5)."""

from collections.abc import Iterator

from maxtext_pp_ext.config.derived import layers_to_choose_from
from maxtext_pp_ext.config.host_keys import HostKeys
from maxtext_pp_ext.config.view import plain
from maxtext_pp_ext.host.rules.sizes import layers_outside

_MODELS_WHOSE_BIASES_ARE_NO_PARAMETERS = ("deepseek3", "deepseek4", "kimi-k2")  # `moe.GateLogit` in MaxText 0.2.5


def problems(config: HostKeys) -> Iterator[str]:
  if plain(config.opt_type) == "muon":
    yield (
        "opt_type=muon: MaxText counts the axes of the matrices that Muon orthogonalizes from a parameter's first axis. "
        "In a pipeline that axis is repeats or stages, so layers would be mixed. Set opt_type=adamw, adam_pax or sgd, or "
        "train without a pipeline."
    )
  if getattr(config, "enable_streaming_diloco", False):
    yield (
        "enable_streaming_diloco=True: MaxText treats a parameter as stacked layers if its size along param_scan_axis="
        f"{config.param_scan_axis} is num_decoder_layers={config.num_decoder_layers}. A pipeline stacks layers along "
        "other axes, so layers would be synchronised in other fragments, at other steps. Set "
        "enable_streaming_diloco=False (enable_diloco=True alone synchronises the whole model), or train without a "
        "pipeline."
    )
  # MaxText has this limit itself, but reports it less clearly.
  if config.parameter_memory_host_offload and config.gradient_accumulation_steps > 1:
    yield (
        f"parameter_memory_host_offload=True with gradient_accumulation_steps={config.gradient_accumulation_steps}:"
        " MaxText moves parameters to the device only in a step without accumulation; it fails without a pipeline, too."
        " Set gradient_accumulation_steps=1, or parameter_memory_host_offload=False."
    )
  if config.use_qk_clip:
    yield from _qk_clip(config)
  if config.routed_bias and config.routed_bias_update_rate > 0:
    yield from _expert_bias(config)


def _qk_clip(config: HostKeys) -> Iterator[str]:
  """MaxText clips layers stacked in one parameter by their common largest logit: all layers, without a pipeline."""
  apart, layers = [], config.pipeline_parallel_layers
  if layers_outside(config) > 0:
    apart.append(f"pipeline_parallel_layers={layers} of {layers_to_choose_from(config)}: set pipeline_parallel_layers=-1")
  if config.num_layers_per_pipeline_stage > 1 and not config.scan_layers_per_stage:
    apart.append(f"num_layers_per_pipeline_stage={config.num_layers_per_pipeline_stage}: set scan_layers_per_stage=True")
  if not config.scan_layers:
    apart.append("scan_layers=False: set scan_layers=True")
  for what in apart:
    yield (
        f"use_qk_clip=True with {what}. MaxText clips layers that are stacked in one parameter by their common largest "
        "logit, so it would clip other layers together than without a pipeline."
    )


def _expert_bias(config: HostKeys) -> Iterator[str]:
  """MaxText's train step adds one update to the bias of one module (0.2.5); see `host.models.sown`."""
  rate = f"routed_bias_update_rate={config.routed_bias_update_rate}"
  if (outside := layers_outside(config)) > 0:
    yield (
        f"{rate} with {outside} layers outside the pipeline (pipeline_parallel_layers={config.pipeline_parallel_layers}):"
        " MaxText's train step moves the biases of one stack of layers only. Set pipeline_parallel_layers=-1, or "
        "routed_bias_update_rate=0."
    )
  if config.num_layers_per_pipeline_stage == 1:
    return
  per_stage = f"num_layers_per_pipeline_stage={config.num_layers_per_pipeline_stage}"
  are_parameters = not config.model_name.startswith(_MODELS_WHOSE_BIASES_ARE_NO_PARAMETERS)
  if not config.scan_layers_per_stage:
    yield (
        f"{rate} with {per_stage}: MaxText's train step moves the biases of one layer of a stage only. Set"
        " scan_layers_per_stage=True, which stacks them."
    )
  elif are_parameters and config.param_scan_axis != 0:
    yield (
        f"{rate} with {per_stage}, scan_layers_per_stage=True and param_scan_axis={config.param_scan_axis}: biases are"
        " stacked along that axis, but the updates that MaxText's train step adds to them along the first. Set"
        " param_scan_axis=0, or num_layers_per_pipeline_stage=1."
    )

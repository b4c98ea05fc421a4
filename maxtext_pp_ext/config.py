# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The keys that this package adds to MaxText's config, and what is wrong with a bad combination of values.

`problems` reads any object that has MaxText's keys as attributes, so that it can be tested, and reused by tools, without
MaxText. It wants the values as MaxText has derived them: -1 and None that are left mean "not derived (yet)" and are not
judged. What only the insides of MaxText's decoder explain is judged in `host.pipelined_path`, and sizes in `sizing`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from maxtext_pp_ext import checkpoint_paths, propose, registry, remedies, sizing
from maxtext_pp_ext.stages import divisors, fitting_microbatches, num_stages, pipelined_layers  # noqa: F401
from maxtext_pp_ext.stages import layers_to_choose_from as _layers_to_choose_from
from maxtext_pp_ext.stages import stages_text as _stages_text
from pydantic import BaseModel, Field

_WAY_OUT = "Leave out pipeline_impl, or set pipeline_impl=host, for MaxText's own pipeline."

# Host key -> what it is asked for instead. They choose how long gathered weights stay, as pipeline_impl does.
_CONTRADICTING_HOST_KEYS = {"pipeline_fsdp_ag_once": "circular_ag_once", "pipeline_fsdp_ag_per_repeat": "circular_bsw"}
_CHOICES = {
    "pipeline_grad_accum_dtype": ("auto", "float32", "bfloat16"),
    "pipeline_gather_dtype": ("auto", "weight", "compute"),
}
_ON_SHARDING_CONFLICT = ("fallback", "warn", "error")


class PipelineConfigError(ValueError):
  """A configuration cannot be trained with the chosen implementation; the message lists every problem at once."""

  def __init__(self, found: list[str]):
    self.problems = tuple(found)
    count = "1 problem" if len(found) == 1 else f"{len(found)} problems"
    super().__init__("\n".join([f"{count} with the pipeline configuration:", *(f"  - {text}" for text in found)]))

  def __reduce__(self):
    return (type(self), (list(self.problems),))


class PipelineConfigWarning(UserWarning):
  """A configuration can be built, and cannot be trained as it is."""


class PipelineKeys(BaseModel):
  """The keys, as a mixin for MaxText's config class.

  Their types are loose: `problems` refuses bad values, together with everything else that is wrong, instead of pydantic
  one by one. None is what MaxText makes of `none` in a yml file or on the command line.
  """

  pipeline_impl: None | str = Field(
      registry.HOST,
      description="Who runs the pipeline: 'host' (MaxText itself), 'circular', 'circular_bsw', 'circular_ag_once', or the"
      " name of an entry point in the group maxtext_pp_ext.pipelines.",
  )
  pipeline_grad_accum_dtype: None | str = Field(
      "auto",
      description="In which dtype weight gradients are summed over microbatches on each device: 'float32', 'bfloat16',"
      " or 'auto', the parameter's own dtype. Sums over devices travel in the dtype of one microbatch's gradient,"
      " as MaxText's plain pipeline's do.",
  )
  pipeline_gather_dtype: None | str = Field(
      "auto",
      description="In which dtype weights are gathered: 'weight' (as they are stored), 'compute' (the dtype key), or"
      " 'auto', the compute dtype where the layer's first use of a weight is that cast, so that nothing changes.",
  )
  sharding_conflicts: None | str = Field(
      "fallback",
      description="What to do, at set-up, about parameters whose logical axes cannot all be sharded as the rules say:"
      " 'fallback' (what MaxText does, without a word), 'warn', or 'error'. It acts with every pipeline_impl, and without"
      " a pipeline.",
  )


def problems(
    config: Any,
    also: Callable[[Any], Sequence[str]] = lambda config: (),
    given: Mapping[str, Any] | None = None,
    whole_mesh: bool = False,
) -> list[str]:
  """Everything that is wrong with our keys, and with MaxText's keys under an implementation of ours; [] if nothing.

  Args:
    config: MaxText's, or anything with its keys.
    also: finds more that is wrong with a config.
    given: what the user has given for `remedies.DERIVED`, if the config has what was derived from it.
    whole_mesh: whether the mesh is one of all devices, as the trainers make it, and the tests of models need not.
  """
  if config.pipeline_impl == registry.HOST:
    return _of_host(config)
  found = [*_of_implementations(config), *also(config)]
  # Nobody makes a smaller mesh of devices that are not there.
  if (
      whole_mesh
      or (found and _devices_are_absent(config))
      or any(isinstance(problem, remedies.Problem) for problem in found)
  ):
    found += sizing.devices(config)

  def check(view: Any) -> list[str]:
    if view.pipeline_impl == registry.HOST:
      return _of_host(view)
    return [*_of_implementations(view), *also(view), *sizing.devices(view)]

  return remedies.with_remedies(config, found, check, propose.proposal, given)


def _devices_are_absent(config: Any) -> bool:
  return bool(getattr(config, "internal_compile", False) or getattr(config, "compile_topology", ""))


def _of_host(config: Any) -> list[str]:
  return [*_bad_choices(config), *_keys_without_effect(config)]


def _of_implementations(config: Any) -> list[str]:
  """What is wrong with an implementation of ours."""
  return [
      *_unknown_implementation(config),
      *_bad_choices(config),
      *_contradicting_host_keys(config),
      *sizing.problems(config),
      *_mesh(config),
      *_expert_bias(config),
      *_explicit_sharding(config),
      *_optimizer(config),
      *_not_supported(config),
      # What is only compiled writes no checkpoint.
      *([] if _devices_are_absent(config) else checkpoint_paths.problems(lambda key: getattr(config, key, None))),
  ]


def _bad_choices(config: Any) -> Iterator[str]:
  for key, choices in (_CHOICES | {"sharding_conflicts": _ON_SHARDING_CONFLICT}).items():
    value = getattr(config, key)
    if value not in choices:
      default = PipelineKeys.model_fields[key].default
      yield f"{key}={value!r} must be one of {', '.join(map(repr, choices))}. Set {key}={default} unless you know better."


def _keys_without_effect(config: Any) -> Iterator[str]:
  for key, choices in _CHOICES.items():
    value = getattr(config, key)
    if value != "auto" and value in choices:
      yield (
          f"{key}={value} has no effect with pipeline_impl=host. Set pipeline_impl to one of "
          f"{', '.join(name for name in registry.names() if name != registry.HOST)}, or leave {key} out."
      )


def _unknown_implementation(config: Any) -> Iterator[str]:
  try:
    registry.get(config.pipeline_impl)
  except registry.UnknownImplementationError as error:
    yield f"{error} {_WAY_OUT}"


def _contradicting_host_keys(config: Any) -> Iterator[str]:
  for key, instead in _CONTRADICTING_HOST_KEYS.items():
    if getattr(config, key):
      yield (
          f"{key}=True together with pipeline_impl={config.pipeline_impl}: both say how long gathered weights stay. Set "
          f"{key}=False; pipeline_impl={instead} does what {key} is for."
      )


def _mesh(config: Any) -> Iterator[str]:
  stages = num_stages(config)
  if stages is not None and stages > 1 and "stage" not in config.mesh_axes:
    yield (
        f"{_stages_text(config)}, but mesh_axes={list(config.mesh_axes)} has no axis 'stage' (custom_mesh_and_rule="
        f"{getattr(config.custom_mesh_and_rule, 'value', config.custom_mesh_and_rule)!r}), so nothing would be "
        "pipelined over devices. Use mesh_axes with 'stage', as base.yml has them, or pipeline_impl=host."
    )


def _explicit_sharding(config: Any) -> Iterator[str]:
  """MaxText's YaRN embedding fixes a layout when it is built that its layers outside a pipeline do not use (0.2.5)."""
  rope_type = getattr(config.rope_type, "value", config.rope_type)
  if getattr(config.shard_mode, "value", config.shard_mode) != "explicit" or not rope_type.startswith("yarn"):
    return
  layers, total = pipelined_layers(config), config.num_decoder_layers
  if layers is not None and total is not None and layers < total:
    yield (
        f"shard_mode=explicit with rope_type={rope_type} and {total - layers} layers outside the pipeline: MaxText's own"
        " layers fail there, since they shard the batch over stages and their rotary embeddings do not. Set"
        " shard_mode=auto."
    )


_MODELS_WHOSE_BIASES_ARE_NO_PARAMETERS = ("deepseek3", "deepseek4", "kimi-k2")  # `moe.GateLogit` in MaxText 0.2.5


def _expert_bias(config: Any) -> Iterator[str]:
  """MaxText's train step adds one update to the bias of one module (0.2.5); see `pipelines.expert_bias`."""
  if not config.routed_bias or config.routed_bias_update_rate <= 0:
    return
  rate = f"routed_bias_update_rate={config.routed_bias_update_rate}"
  layers, available = pipelined_layers(config), _layers_to_choose_from(config)
  if layers is not None and available is not None and layers < available:
    yield (
        f"{rate} with {available - layers} layers outside the pipeline (pipeline_parallel_layers={layers}):"
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
        " stacked along that axis, and the updates that MaxText's train step adds to them along the first. Set"
        " param_scan_axis=0, or num_layers_per_pipeline_stage=1."
    )


def _optimizer(config: Any) -> Iterator[str]:
  """What MaxText's train step does to parameters by their path and shape, which a pipeline changes (0.2.5)."""
  if getattr(config.opt_type, "value", config.opt_type) == "muon":
    yield (
        "opt_type=muon: MaxText counts the axes of the matrices that Muon orthogonalizes from a parameter's first axis, "
        "which in a pipeline is its repeats or stages, so that layers are mixed. Set opt_type=adamw, adam_pax or sgd, or "
        "train without a pipeline."
    )
  if getattr(config, "enable_streaming_diloco", False):
    yield (
        "enable_streaming_diloco=True: MaxText takes a parameter for stacked layers if its size along param_scan_axis="
        f"{config.param_scan_axis} is num_decoder_layers={config.num_decoder_layers}. A pipeline stacks layers along "
        "other axes, so that they would be synchronised in other fragments, at other steps. Set "
        "enable_streaming_diloco=False (enable_diloco=True alone synchronises the whole model), or train without a "
        "pipeline."
    )
  if config.use_qk_clip:
    yield from _qk_clip(config)


def _qk_clip(config: Any) -> Iterator[str]:
  """MaxText clips all layers of one stacked parameter by their largest logit: all layers, without a pipeline."""
  layers, available = pipelined_layers(config), _layers_to_choose_from(config)
  apart = []
  if layers is not None and available is not None and layers < available:
    apart.append(f"pipeline_parallel_layers={layers} of {available}: set pipeline_parallel_layers=-1")
  if config.num_layers_per_pipeline_stage > 1 and not config.scan_layers_per_stage:
    per_stage = config.num_layers_per_pipeline_stage
    apart.append(f"num_layers_per_pipeline_stage={per_stage}: set scan_layers_per_stage=True")
  if not config.scan_layers:
    apart.append("scan_layers=False: set scan_layers=True")
  for what in apart:
    yield (
        f"use_qk_clip=True with {what}. MaxText clips layers that are stacked in one parameter by their common largest "
        "logit, and would clip other layers together than without a pipeline."
    )


def _not_supported(config: Any) -> Iterator[str]:
  """What our implementations cannot do, and what MaxText itself cannot and says less clearly."""
  yield from _quantization(config)
  if config.parameter_memory_host_offload and config.gradient_accumulation_steps > 1:
    yield (
        f"parameter_memory_host_offload=True with gradient_accumulation_steps={config.gradient_accumulation_steps}:"
        " MaxText brings parameters to the device only in a step without accumulation; it fails without a pipeline, too."
        " Set gradient_accumulation_steps=1, or parameter_memory_host_offload=False."
    )


# Scales that qwix makes when a layer is first called, and the same operations with scales that a layer is built with.
_SCALES_OF_FIRST_CALL = {"fp8_gpu": "fp8", "fp8_nanoo": "nanoo_fp8"}


def _quantization(config: Any) -> Iterator[str]:
  """Of what `quantization` names; values that MaxText itself does not train with are left to MaxText."""
  name = getattr(config.quantization, "value", config.quantization) or ""
  if name in _SCALES_OF_FIRST_CALL:
    yield (
        f"quantization={name}: qwix makes its scales when a layer is first called, which in a pipeline is where they are "
        f"lost (MaxText's own pipeline fails, too). Set quantization={_SCALES_OF_FIRST_CALL[name]} and "
        "use_qwix_quantization=False for the same operations."
    )
  if name.startswith("te_"):
    yield (
        f"quantization={name}: operations of NVIDIA's Transformer Engine have not been tried in pipelines of "
        f"maxtext-pp-ext. Set quantization=fp8 and use_qwix_quantization=False for fp8 on NVIDIA GPUs. {_WAY_OUT}"
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


def _scans_layers_of_stages(config: Any) -> bool:
  return config.scan_layers_per_stage and config.num_layers_per_pipeline_stage > 1


def _parts_of_microbatch(config: Any) -> Iterator[str]:
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

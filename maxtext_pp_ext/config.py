# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The keys that this package adds to MaxText's config, and what is wrong with a bad combination of values.

`problems` reads any object that has MaxText's keys as attributes, so that it can be tested, and reused by tools, without
MaxText. It wants the values as MaxText has derived them: -1 and None that are left mean "not derived (yet)" and are not
judged. What only the insides of MaxText's decoder explain is judged in `host.pipelined_path`.

Symbols as in `schedule`: S stages, M microbatches, R repeats, D forwarding delay; P layers per stage, L pipelined layers.
"""

from collections.abc import Iterator
import math
from typing import Any

from maxtext_pp_ext import registry
from pydantic import BaseModel, Field

_WAY_OUT = "Leave out pipeline_impl, or set pipeline_impl=host, for MaxText's own pipeline."

# Host key -> what it is asked for instead. They choose how long gathered weights stay, as pipeline_impl does.
_CONTRADICTING_HOST_KEYS = {"pipeline_fsdp_ag_once": "circular_ag_once", "pipeline_fsdp_ag_per_repeat": "circular_bsw"}
_CHOICES = {
    "pipeline_grad_accum_dtype": ("auto", "float32", "bfloat16"),
    "pipeline_gather_dtype": ("auto", "weight", "compute"),
}
# A number of stages that is proposed is at most so large.
_MOST_PROPOSED_STAGES = 1024
_ON_SHARDING_CONFLICT = ("fallback", "warn", "error")


class PipelineConfigError(ValueError):
  """A configuration cannot be trained with the chosen implementation; the message lists every problem at once."""

  def __init__(self, found: list[str]):
    self.problems = tuple(found)
    count = "1 problem" if len(found) == 1 else f"{len(found)} problems"
    super().__init__("\n".join([f"{count} with the pipeline configuration:", *(f"  - {text}" for text in found)]))

  def __reduce__(self):
    return (type(self), (list(self.problems),))


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


def problems(config: Any) -> list[str]:
  """Everything that is wrong with our keys, and with MaxText's keys under an implementation of ours; [] if nothing."""
  found = list(_bad_choices(config))
  if config.pipeline_impl == registry.HOST:
    return found + list(_keys_without_effect(config))
  return [
      *_unknown_implementation(config),
      *found,
      *_contradicting_host_keys(config),
      *_stages(config),
      *_layers(config),
      *_microbatches(config),
      *_batch(config),
      *_other_batches(config),
      *_mesh(config),
      *_expert_bias(config),
      *_explicit_sharding(config),
      *_optimizer(config),
      *_not_supported(config),
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


def _stages(config: Any) -> Iterator[str]:
  for key in ("ici_pipeline_parallelism", "dcn_pipeline_parallelism"):
    value = getattr(config, key)
    if value < 1:
      yield f"{key}={value}: MaxText does not derive the number of stages. Set {key} to a number of at least 1."
  if num_stages(config) == 1:
    layers = pipelined_layers(config)
    per_stage = max(config.num_layers_per_pipeline_stage, 1)
    candidates = range(2, 1 + min((layers or 0) // per_stage, _MOST_PROPOSED_STAGES))
    fitting = next((s for s in candidates if layers % (s * per_stage) == 0), None)
    example = f", for example {fitting}," if fitting else ""
    yield (
        f"pipeline_impl={config.pipeline_impl} without a pipeline: ici_pipeline_parallelism=1 × "
        f"dcn_pipeline_parallelism=1 = 1 stage. Set ici_pipeline_parallelism (stages within a slice) or "
        f"dcn_pipeline_parallelism (stages on different slices) to the number of stages{example} or set "
        "pipeline_impl=host."
    )


def num_stages(config: Any) -> int | None:
  """S = ici_pipeline_parallelism × dcn_pipeline_parallelism, or None if one of them is no number of stages."""
  ici, dcn = config.ici_pipeline_parallelism, config.dcn_pipeline_parallelism
  return ici * dcn if ici >= 1 and dcn >= 1 else None


def forwarding_delay(config: Any) -> int:
  """D: 2 with pipeline_delay_activation_forwarding, else 1."""
  return 2 if config.pipeline_delay_activation_forwarding else 1


def _stages_text(config: Any) -> str:
  return (
      f"{num_stages(config)} stages (ici_pipeline_parallelism={config.ici_pipeline_parallelism} × "
      f"dcn_pipeline_parallelism={config.dcn_pipeline_parallelism})"
  )


def _layers_to_choose_from(config: Any) -> int | None:
  """How many layers of the model could be in the pipeline: DeepSeek's leading dense layers run before it."""
  if config.num_decoder_layers is None:
    return None
  return config.num_decoder_layers - (config.first_num_dense_layers if _is_deepseek(config) else 0)


def _is_deepseek(config: Any) -> bool:
  return getattr(config.decoder_block, "value", config.decoder_block) == "deepseek"


def pipelined_layers(config: Any) -> int | None:
  """L, as pipeline_parallel_layers or the model says."""
  layers = config.pipeline_parallel_layers
  return _layers_to_choose_from(config) if layers == -1 else layers


def _layers_text(config: Any) -> str:
  available = f"num_decoder_layers={config.num_decoder_layers}"
  if _is_deepseek(config):
    available += f" − first_num_dense_layers={config.first_num_dense_layers}"
  return f"{pipelined_layers(config)} pipelined layers (pipeline_parallel_layers, by default {available})"


def _layers(config: Any) -> Iterator[str]:
  stages, layers, available = num_stages(config), pipelined_layers(config), _layers_to_choose_from(config)
  per_stage = config.num_layers_per_pipeline_stage
  if per_stage < 1:
    yield f"num_layers_per_pipeline_stage={per_stage} must be at least 1. Set num_layers_per_pipeline_stage=1."
    return
  if layers is None or available is None or stages is None or stages == 1:
    return
  group = stages * per_stage
  group_text = f"{_stages_text(config)} × num_layers_per_pipeline_stage={per_stage} = {group}"
  if layers > available:
    yield (
        f"pipeline_parallel_layers={layers} is more than the model has: {available}. Set pipeline_parallel_layers to at "
        f"most {available // group * group or group}, or -1 for all layers."
    )
  elif layers < group:
    yield (
        f"{_layers_text(config)} are fewer than {group_text}. Set ici_pipeline_parallelism × dcn_pipeline_parallelism × "
        f"num_layers_per_pipeline_stage to at most {layers}, or base_num_decoder_layers so that {group} layers result."
    )
  elif layers % group:
    kept = layers // group * group
    yield (
        f"{_layers_text(config)} cannot be divided among {group_text}. Set pipeline_parallel_layers={kept} (the other "
        f"{available - kept} then run outside the pipeline on every stage), or change one factor so that the product "
        f"divides {layers}."
    )
  elif config.num_pipeline_repeats not in (-1, layers // group):
    repeats = config.num_pipeline_repeats
    yield (
        f"num_pipeline_repeats={repeats} × {group_text} is {repeats * group}, not the {_layers_text(config)}. Set "
        f"num_pipeline_repeats={layers // group}, or -1 to have it derived."
    )


def _microbatches(config: Any) -> Iterator[str]:
  stages, microbatches = num_stages(config), config.num_pipeline_microbatches
  if stages is None or stages == 1 or microbatches == -1:
    return
  delay, least = forwarding_delay(config), _least_microbatches(config)
  fitting = fitting_microbatches(config)
  nearest = (
      min(fitting, key=lambda m: abs(m - microbatches)) if fitting else max(-(-microbatches // stages) * stages, least)
  )
  if microbatches % stages or microbatches < 1:
    yield (
        f"num_pipeline_microbatches={microbatches} is not a multiple of {_stages_text(config)}, as it must be for every "
        f"stage to keep equally many. Set num_pipeline_microbatches={nearest}, or -1 for {least}."
    )
  if microbatches < least:
    why = " with pipeline_delay_activation_forwarding=True" if delay == 2 else ""
    yield (
        f"num_pipeline_microbatches={microbatches} is fewer than {least} = {delay} × {_stages_text(config)}{why}: a "
        f"microbatch needs that many iterations to come back to the first stage. Set "
        f"num_pipeline_microbatches={nearest}, or -1 for {least}."
    )


def _least_microbatches(config: Any) -> int:
  """D·S, which is also what MaxText takes for -1."""
  return forwarding_delay(config) * num_stages(config)


def fitting_microbatches(config: Any) -> list[int]:
  """All M that are multiples of S, at least D·S, and divide the batch, ascending."""
  batch, stages = config.micro_batch_size_to_train_on or 0, num_stages(config)
  if batch < 1 or batch % stages:
    return []
  return [stages * k for k in divisors(batch // stages) if k >= forwarding_delay(config)]


def divisors(number: int) -> list[int]:
  """All divisors of a positive number, ascending; of one beyond 10¹² those that one of 10⁶ or less leads to."""
  small = [k for k in range(1, min(math.isqrt(number), 10**6) + 1) if number % k == 0]
  return sorted({*small, *(number // k for k in small)})


def _batch(config: Any) -> Iterator[str]:
  batch, stages = config.micro_batch_size_to_train_on, num_stages(config)
  if batch is None or batch < 0 or stages is None or stages == 1:
    return
  least, fitting = _least_microbatches(config), fitting_microbatches(config)
  microbatches = least if config.num_pipeline_microbatches == -1 else config.num_pipeline_microbatches
  if microbatches % stages or microbatches < least:
    if fitting:
      return  # `_microbatches` names one of those
    microbatches = least
  elif batch > 0 and batch % microbatches == 0:
    return
  devices = config.num_target_devices
  ways = [f"num_pipeline_microbatches={min(fitting, key=lambda m: abs(m - microbatches))}"] if fitting else []
  if devices:
    ways.append(f"per_device_batch_size={_per_device_batch_size(batch, microbatches, devices)}")
  yield (
      f"a batch of {batch} rows (int(num_target_devices={devices} × per_device_batch_size="
      f"{config.per_device_batch_size})) cannot be divided into {microbatches} microbatches "
      f"(num_pipeline_microbatches, by default {least}). Set {' or '.join(ways)}."
  )


def _other_batches(config: Any) -> Iterator[str]:
  """The batches of evaluations and of a growing batch size, which the pipeline divides into as many microbatches."""
  batch, stages, devices = config.micro_batch_size_to_train_on, num_stages(config), config.num_target_devices
  microbatches = config.num_pipeline_microbatches
  if batch is None or batch < 1 or stages is None or stages == 1 or microbatches < 1 or batch % microbatches:
    return  # `_batch` or `_microbatches` has something to say first
  if config.eval_interval > 0:
    rows = config.micro_batch_size_to_eval_on
    if rows < 1 or rows % microbatches:
      ways = [f"eval_per_device_batch_size={_per_device_batch_size(rows, microbatches, devices)}"] if devices else []
      ways += [
          f"num_pipeline_microbatches={m}" for m in fitting_microbatches(config)[::-1] if 0 < rows and rows % m == 0
      ][:1]
      yield (
          f"an evaluation's batch of {rows} rows (int(num_target_devices={devices} × eval_per_device_batch_size="
          f"{config.eval_per_device_batch_size})) cannot be divided into {microbatches} microbatches "
          f"(num_pipeline_microbatches), as evaluations are, too. Set {' or '.join([*ways, 'eval_interval=-1'])}."
      )
  if config.enable_rampup_batch_size:
    yield from _growing_batch(config, microbatches)


def _growing_batch(config: Any, microbatches: int) -> Iterator[str]:
  devices, accumulated = config.num_target_devices, config.gradient_accumulation_steps
  start, increment = config.per_device_batch_size_start, config.per_device_batch_size_increment
  if not devices or start <= 0 or increment <= 0:
    return
  rows = {"per_device_batch_size_start": (start, int(devices * start))}
  if start + increment < config.per_device_batch_size:
    rows["per_device_batch_size_increment"] = (increment, int(devices * increment))
  for key, (value, count) in rows.items():
    if count < 1 or count % (microbatches * accumulated):
      fitting = _per_device_batch_size(count, microbatches * accumulated, devices)
      yield (
          f"enable_rampup_batch_size=True with {key}={value}: {count} rows (int(num_target_devices={devices} × {value})) "
          f"cannot be divided into gradient_accumulation_steps={accumulated} × num_pipeline_microbatches={microbatches} "
          f"microbatches. Set {key}={fitting}, or enable_rampup_batch_size=False."
      )


def _per_device_batch_size(batch: int, microbatches: int, devices: int) -> str:
  """What to set for the least batch that is a multiple of the microbatches and not smaller than this one."""
  rows = max(-(-batch // microbatches), 1) * microbatches
  text = f"{rows / devices:g}"
  if int(devices * float(text)) != rows:  # the host truncates; a fraction such as 1/3 would lose a row
    multiple = math.lcm(microbatches, devices)
    text = f"{-(-rows // multiple) * multiple // devices}"
  return text


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
        f"{config.param_scan_axis} is num_decoder_layers={config.num_decoder_layers}. A pipeline stacks layers along other "
        "axes, so that they would be synchronised in other fragments, at other steps. Set enable_streaming_diloco=False "
        "(enable_diloco=True alone synchronises the whole model), or train without a pipeline."
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
  if name == "serve_fp8_weight":
    yield f'quantization={name} is for serving, a pipeline is for training. Set quantization="" or another value.'
  if name == "int8" and not config.use_qwix_quantization:
    yield from _parts_of_microbatch(config)


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

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Stages, layers, microbatches, rows and devices of a config, computed from the values of its keys.

Symbols as in `schedule`: S stages, M microbatches, R repeats, D forwarding delay; P layers per stage, L pipelined layers.
"""

from collections.abc import Mapping
import math
import os
import re

from maxtext_pp_ext import registry
from maxtext_pp_ext.config.host_keys import HostKeys
from maxtext_pp_ext.config.keys import DerivedKeys
from maxtext_pp_ext.config.view import plain

_ON = ("true", "True", "TRUE", "1")  # values of a flag of XLA
NETWORKS = ("ici", "dcn")
# Mesh axis -> its name in the parallelism key, where the two differ.
_NAMES = {"stage": "pipeline", "model": "tensor"}
# Keys of a pipeline's layers -> their values without one.
WITHOUT_PIPELINE = {
    "num_layers_per_pipeline_stage": 1,
    "num_pipeline_repeats": -1,
    "pipeline_parallel_layers": -1,
    "pipeline_delay_activation_forwarding": False,
}


def pipeline_impl(config: HostKeys) -> str:
  """The implementation that a config asks for; `host` if the config lacks our keys."""
  return getattr(config, "pipeline_impl", registry.HOST)


def runs_ours(config: HostKeys) -> bool:
  """Whether an implementation of ours runs the model's layers, with a pipeline or without."""
  return pipeline_impl(config) != registry.HOST


def windowed(config: HostKeys) -> bool:
  """Whether an implementation of ours runs the layers of a model without a pipeline."""
  return runs_ours(config) and num_stages(config) == 1


def adds_up_logits(config: HostKeys) -> bool:
  """Whether backward of a pipeline of ours over slices is to add up the gradient of the logits' weight.

  Not if other products use the weight, too, if the product is no plain one, or if it is computed behind the decoder.
  """
  if not getattr(config, "using_pipeline_parallelism", False) or not runs_ours(config):
    return False
  others = (
      "logits_via_embedding",
      "mtp_num_layers",
      "use_indexer",
      "quantize_logits_proj",
      "parameter_memory_host_offload",
  )
  is_plain = plain(config.shard_mode) == "auto" and not any(getattr(config, key, False) for key in others)
  return is_plain and config.dcn_pipeline_parallelism > 1 and config.num_vocab_tiling <= 1


def sums_logits_in_parts(config: DerivedKeys) -> bool:
  """Whether MaxText adds up the gradient of the logits' weights over parts of the logits, gathered and in float32."""
  return getattr(config, "vocab_tiling_ag_once", False) and config.num_vocab_tiling > 1


def microbatches_of_window(config: HostKeys) -> int:
  """M without a pipeline, where num_pipeline_microbatches=-1 stands for one microbatch."""
  return max(config.num_pipeline_microbatches, 1)


def keys_of_window(config: HostKeys, length: int) -> dict[str, int]:
  """Values of a pipeline's keys with which `length` layers run without one, as repeats of one stage."""
  return {"num_pipeline_repeats": length, "num_pipeline_microbatches": microbatches_of_window(config)}


def without_effect(config: HostKeys) -> dict[str, int | bool]:
  """The keys of a pipeline's layers that have no effect without one, with the values they should have."""
  # MaxText derives pipeline_parallel_layers=-1: all layers are what it says without a pipeline.
  allowed = {"pipeline_parallel_layers": layers_to_choose_from(config)}
  found = ((key, value, getattr(config, key)) for key, value in WITHOUT_PIPELINE.items())
  return {key: value for key, value, own in found if own not in (value, allowed.get(key, value))}


def gathers_on_sparsecores(config: HostKeys) -> bool:
  """Whether XLA's flags let gathers run on the SparseCores."""
  return xla_flag(config, "xla_tpu_enable_sparse_core_collective_offload_all_gather") in _ON


def dispatches_beside_compute(config: HostKeys) -> bool:
  """Whether XLA's flags let the ragged all-to-alls of experts overlap with compute."""
  return xla_flag(config, "xla_tpu_enable_async_ragged_all_to_all") in _ON


def xla_flag(config: HostKeys, name: str) -> str | None:
  """The value of one of XLA's flags, None without it. The config's flags come after those of the process."""
  flags = f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {config.compile_xla_flags or ''}"
  return (re.findall(rf"--{name}=(\S+)", flags) or [None])[-1]


def flags_missing_in_run(config: HostKeys) -> list[str]:
  """The flags of `compile_xla_flags` that the process lacks.

  MaxText 0.2.5 compiles with the key ahead of time, and then trains with a step that JAX compiles without it.
  """
  process = os.environ.get("LIBTPU_INIT_ARGS", "").split()
  return [flag for flag in (config.compile_xla_flags or "").split() if flag not in process]


def collective_matmul_from(config: HostKeys) -> float:
  """The size of a weight in MiB from which on XLA's flags let it make a collective matmul."""
  given = (xla_flag(config, "xla_jf_spmd_threshold_for_windowed_einsum_mib") or "0").strip("\"'")
  try:
    return float(given)
  except ValueError:  # which XLA refuses
    return 0.0


def num_stages(config: HostKeys) -> int | None:
  """S = ici_pipeline_parallelism × dcn_pipeline_parallelism, or None if one of them is below 1."""
  return sound_stages(config) if min(config.ici_pipeline_parallelism, config.dcn_pipeline_parallelism) >= 1 else None


def sound_stages(config: HostKeys) -> int:
  """S of a config whose keys are known to be at least 1."""
  return config.ici_pipeline_parallelism * config.dcn_pipeline_parallelism


def forwarding_delay(config: HostKeys) -> int:
  """D: 2 with pipeline_delay_activation_forwarding, else 1."""
  return 2 if config.pipeline_delay_activation_forwarding else 1


def stages_text(config: HostKeys) -> str:
  return (
      f"{num_stages(config)} stages (ici_pipeline_parallelism={config.ici_pipeline_parallelism} × "
      f"dcn_pipeline_parallelism={config.dcn_pipeline_parallelism})"
  )


def decoder_block(config: HostKeys) -> str:
  """The kind of the model's decoder layers."""
  return plain(config.decoder_block)


def is_deepseek(config: HostKeys) -> bool:
  return decoder_block(config) == "deepseek"


def layers_to_choose_from(config: HostKeys) -> int | None:
  """How many layers of the model can be in the pipeline: all but DeepSeek's dense layers, which run before it."""
  if config.num_decoder_layers is None:
    return None
  return config.num_decoder_layers - (config.first_num_dense_layers if is_deepseek(config) else 0)


def pipelined_layers(config: HostKeys) -> int | None:
  """L: pipeline_parallel_layers, or for -1 all layers that can be in the pipeline."""
  layers = config.pipeline_parallel_layers
  return layers_to_choose_from(config) if layers == -1 else layers


def sound_layers(config: DerivedKeys) -> int:
  """L of a config whose number of layers is known."""
  return pipelined_layers(config)  # type: ignore[return-value]  # None only for num_decoder_layers=None


def least_microbatches(config: HostKeys) -> int:
  """D·S, which is also MaxText's value for num_pipeline_microbatches=-1."""
  return forwarding_delay(config) * sound_stages(config)


def fitting_microbatches(config: HostKeys) -> list[int]:
  """All M that divide the batch, are multiples of S and are at least D·S, ascending."""
  batch, stages = config.micro_batch_size_to_train_on or 0, sound_stages(config)
  if batch < 1 or batch % stages:
    return []
  return [stages * k for k in divisors(batch // stages) if k >= forwarding_delay(config)]


def divisors(number: int) -> list[int]:
  """All divisors of a positive number, ascending. Beyond 10¹²: only divisors up to 10⁶ and their cofactors."""
  small = [k for k in range(1, min(math.isqrt(number), 10**6) + 1) if number % k == 0]
  return sorted({*small, *(number // k for k in small)})


def parallelism_key(network: str, axis: str) -> str:
  return f"{network}_{_NAMES.get(axis, axis)}_parallelism"


def parallelism(config: HostKeys, network: str) -> dict[str, int]:
  """Mesh axis -> size as given, on "ici" (within a slice) or "dcn" (over slices)."""
  axes = list(config.mesh_axes)
  listed = getattr(config, f"{network}_parallelism", None)  # a user may give the list itself
  if listed and len(listed) == len(axes):
    return dict(zip(axes, listed, strict=True))
  return {axis: getattr(config, parallelism_key(network, axis), 1) for axis in axes}


def devices_to_share(config: HostKeys, network: str) -> int | None:
  """The product that the parallelism must have: devices of a slice, or slices; None if it is not known."""
  devices, slices = config.num_target_devices, getattr(config, "num_slices", 1)
  if not devices or not slices or devices < 1 or slices < 1 or devices % slices:
    return None
  if network == "ici":
    return devices // slices
  return slices if slices > 1 else None  # with one slice MaxText ignores the other network


def filled(sizes: Mapping[str, int], target: int) -> dict[str, int] | None:
  """The sizes with -1 replaced by what is left, or None if they cannot make the target; as MaxText does."""
  known = math.prod(size for size in sizes.values() if size != -1)
  unknown = sum(size == -1 for size in sizes.values())
  if known < 1 or unknown > 1 or any(size < 1 and size != -1 for size in sizes.values()):
    return None
  if target % known or (not unknown and known != target):
    return None
  return {axis: target // known if size == -1 else size for axis, size in sizes.items()}


def sizes_of_axes(config: HostKeys, network: str) -> dict[str, int] | None:
  """Mesh axis -> size, -1 derived; 1 on a network that has nothing to share. None if they do not make its devices."""
  asked, target = parallelism(config, network), devices_to_share(config, network)
  return dict.fromkeys(asked, 1) if target is None else filled(asked, target)


def mesh_shape(config: HostKeys) -> dict[str, int] | None:
  """Axis -> size of the mesh of all devices, or None if the parallelism does not give their number."""
  ici, dcn = (sizes_of_axes(config, network) for network in NETWORKS)
  if devices_to_share(config, "ici") is None or ici is None or dcn is None:
    return None
  return {axis: size * dcn[axis] for axis, size in ici.items()}


def batches(config: HostKeys) -> dict[str, tuple[int, int]]:
  """Key of each batch that has an effect -> (its rows, the microbatches into which one update divides them)."""
  microbatches, devices = config.num_pipeline_microbatches, config.num_target_devices
  found = {"per_device_batch_size": (config.micro_batch_size_to_train_on or 0, microbatches)}
  if config.eval_interval > 0:
    found["eval_per_device_batch_size"] = (config.micro_batch_size_to_eval_on or 0, microbatches)
  start, increment = config.per_device_batch_size_start, config.per_device_batch_size_increment
  if config.enable_rampup_batch_size and devices and start > 0 and increment > 0:
    accumulated = microbatches * config.gradient_accumulation_steps
    found["per_device_batch_size_start"] = (int(devices * start), accumulated)
    if start + increment < config.per_device_batch_size:
      found["per_device_batch_size_increment"] = (int(devices * increment), accumulated)
  return found

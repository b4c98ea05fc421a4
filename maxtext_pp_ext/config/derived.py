# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""How many stages, layers, microbatches, rows and devices a config asks for. Arithmetic on the values of its keys.

Symbols as in `schedule`: S stages, M microbatches, R repeats, D forwarding delay; P layers per stage, L pipelined layers.
"""

from collections.abc import Sequence
import math

from maxtext_pp_ext import registry
from maxtext_pp_ext.config.host_keys import HostKeys
from maxtext_pp_ext.config.keys import DerivedKeys
from maxtext_pp_ext.config.view import plain

NETWORKS = ("ici", "dcn")
# Mesh axes whose parallelism has another name in its key.
_NAMES = {"stage": "pipeline", "model": "tensor"}


def pipeline_impl(config: HostKeys) -> str:
  """The implementation a config asks for; `host` if it was made without our keys."""
  return getattr(config, "pipeline_impl", registry.HOST)


def num_stages(config: HostKeys) -> int | None:
  """S = ici_pipeline_parallelism × dcn_pipeline_parallelism, or None if one of them is no number of stages."""
  sound = config.ici_pipeline_parallelism >= 1 and config.dcn_pipeline_parallelism >= 1
  return sound_stages(config) if sound else None


def sound_stages(config: HostKeys) -> int:
  """S of a config in which it is known to be a number of stages."""
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
  """How many layers of the model could be in the pipeline: DeepSeek's leading dense layers run before it."""
  if config.num_decoder_layers is None:
    return None
  return config.num_decoder_layers - (config.first_num_dense_layers if is_deepseek(config) else 0)


def pipelined_layers(config: HostKeys) -> int | None:
  """L, as pipeline_parallel_layers or the model says."""
  layers = config.pipeline_parallel_layers
  return layers_to_choose_from(config) if layers == -1 else layers


def sound_layers(config: DerivedKeys) -> int:
  """L of a config whose number of layers is known."""
  return pipelined_layers(config)  # type: ignore[return-value]  # None only for num_decoder_layers=None


def least_microbatches(config: HostKeys) -> int:
  """D·S, which is also what MaxText takes for -1."""
  return forwarding_delay(config) * sound_stages(config)


def fitting_microbatches(config: HostKeys) -> list[int]:
  """All M that are multiples of S, at least D·S, and divide the batch, ascending."""
  batch, stages = config.micro_batch_size_to_train_on or 0, sound_stages(config)
  if batch < 1 or batch % stages:
    return []
  return [stages * k for k in divisors(batch // stages) if k >= forwarding_delay(config)]


def divisors(number: int) -> list[int]:
  """All divisors of a positive number, ascending; of one beyond 10¹² those that one of 10⁶ or less leads to."""
  small = [k for k in range(1, min(math.isqrt(number), 10**6) + 1) if number % k == 0]
  return sorted({*small, *(number // k for k in small)})


def parallelism_key(network: str, axis: str) -> str:
  return f"{network}_{_NAMES.get(axis, axis)}_parallelism"


def parallelism(config: HostKeys, network: str) -> dict[str, int]:
  """What the keys say for each mesh axis on "ici" (within a slice) or "dcn" (over slices), as MaxText reads them."""
  axes = list(config.mesh_axes)
  listed = getattr(config, f"{network}_parallelism", None)  # a user may give the list itself
  if listed and len(listed) == len(axes):
    return dict(zip(axes, listed, strict=True))
  return {axis: getattr(config, parallelism_key(network, axis), 1) for axis in axes}


def devices_to_share(config: HostKeys, network: str) -> int | None:
  """How many devices of a slice, or how many slices, the parallelism has to come to; None if that is not known."""
  devices, slices = config.num_target_devices, getattr(config, "num_slices", 1)
  if not devices or not slices or devices < 1 or slices < 1:
    return None
  if network == "ici":
    return devices // slices
  return slices if slices > 1 else None  # MaxText does not look at the other network then


def filled(sizes: Sequence[int], target: int) -> list[int] | None:
  """Sizes with what is left for the one that is -1, or None if they do not come to the target, as MaxText has it."""
  known = math.prod(size for size in sizes if size != -1)
  unknown = sum(size == -1 for size in sizes)
  if known < 1 or unknown > 1 or any(size < 1 and size != -1 for size in sizes):
    return None
  if target % known or (not unknown and known != target):
    return None
  return [target // known if size == -1 else size for size in sizes]


def mesh_shape(config: HostKeys) -> dict[str, int] | None:
  """The size of each axis of the mesh of all devices, or None if the parallelism does not come to their number."""
  shape = dict.fromkeys(config.mesh_axes, 1)
  for network in NETWORKS:
    target = devices_to_share(config, network)
    if target is None:
      if network == "ici":
        return None
      continue
    asked = parallelism(config, network)
    sizes = filled(list(asked.values()), target)
    if sizes is None:
      return None
    for axis, size in zip(asked, sizes, strict=True):
      shape[axis] *= size
  return shape


def growing(config: HostKeys) -> dict[str, tuple[float, int]]:
  """The keys of a growing batch that say something: their values, and how many rows these are on all devices."""
  devices = config.num_target_devices
  start, increment = config.per_device_batch_size_start, config.per_device_batch_size_increment
  if not config.enable_rampup_batch_size or not devices or start <= 0 or increment <= 0:
    return {}
  found = {"per_device_batch_size_start": start}
  if start + increment < config.per_device_batch_size:
    found["per_device_batch_size_increment"] = increment
  return {key: (value, int(devices * value)) for key, value in found.items()}

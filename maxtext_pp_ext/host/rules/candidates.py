# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The sizes that a pipeline could have: stages and other axes of the mesh, layers, microbatches, rows and devices.

Errors propose those nearest to what was asked for, and a plan looks at all. Both search here, and judge for themselves.
"""

from collections.abc import Iterator, Mapping, Sequence
import itertools
import math
import operator
import types
from typing import Any

from maxtext_pp_ext.config import derived
from maxtext_pp_ext.config.host_keys import HostKeys
from maxtext_pp_ext.config.keys import DerivedKeys
from maxtext_pp_ext.config.remedies import BATCHES, changed, Values
from maxtext_pp_ext.host import topology
from maxtext_pp_ext.host.rules import rows as rows_of_devices

_MOST_STAGES = 1024
_MOST_CANDIDATES = 24  # of a kind
# The axes that give their devices to stages and experts, and take those that remain.
DONORS = ("fsdp", "data")
_MOST_HALVINGS, _MOST_DOUBLINGS = 8, 6  # of the batch, and of the devices
_KV_KERNEL = ("kv_heads", "embed", "kv_head_dim")
_INPUTS = ("activation_embed_and_logits_batch", "activation_norm_length")


def _distance(a: int, b: int) -> float:
  return abs(math.log(max(a, 1) / max(b, 1)))


def _nearest(candidates: Sequence[int], value: int) -> list[int]:
  """The candidates with the smallest ratio to `value`, up or down, in that order."""
  return sorted(dict.fromkeys(candidates), key=lambda c: (_distance(c, value), c))[:_MOST_CANDIDATES]


def microbatches(config: HostKeys) -> list[int]:
  """The numbers of microbatches into which the batch can be divided, the nearest first."""
  return sorted(derived.fitting_microbatches(config), key=lambda m: abs(m - config.num_pipeline_microbatches))


def batches(
    config: HostKeys, divided_by: int, key: str = "per_device_batch_size", units: Sequence[int] = (1,)
) -> list[int | float]:
  """Batch sizes per device, at least the present one of `key`, whose rows divide into this many microbatches.

  There is one size for each unit; with it a microbatch has a multiple of `unit` rows.
  """
  if not (devices := config.num_target_devices):
    return []
  now = getattr(config, BATCHES[key]) if key in BATCHES else int(devices * getattr(config, key))
  # MaxText loads at least one row per device, and divides the loaded rows equally.
  loaded = rows_of_devices.shards(_INPUTS, config)
  found = []
  for unit in units:
    multiple = divided_by * unit
    if (rows := _ceil(now, multiple)) >= devices:
      multiple = math.lcm(multiple, loaded)
      rows = _ceil(now, multiple)
    size = float(f"{rows / devices:g}")
    if int(devices * size) != rows:  # MaxText truncates; a fraction such as 1/3 would lose a row
      size = _ceil(now, math.lcm(multiple, devices)) // devices
    found.append(int(size) if size == int(size) else size)
  return list(dict.fromkeys(found))


def smaller_batches(config: DerivedKeys) -> Iterator[dict[str, float]]:
  """Yields a half of the batch per device, a quarter, and so on, as long as a step has rows."""
  for size in (config.per_device_batch_size / 2**halving for halving in range(1, _MOST_HALVINGS + 1)):
    if size * config.num_target_devices < 1:
      return
    yield {"per_device_batch_size": size}


def _ceil(rows: int, multiple: int) -> int:
  return max(-(-rows // multiple), 1) * multiple


def parallelism(config: HostKeys) -> list[dict[str, int]]:
  """Changes that use all devices and keep a pipeline, or none; those nearest to the present number of stages first."""
  least, most = (1, 1) if derived.num_stages(config) == 1 else (2, _MOST_STAGES)
  present, heads, found = derived.num_stages(config) or 1, getattr(config, "num_kv_heads", None), []
  for ici, dcn in itertools.product(*(list(_shares(config, network)) for network in derived.NETWORKS)):
    stages = ici["ici_pipeline_parallelism"] * dcn["dcn_pipeline_parallelism"]
    changes = {key: value for key, value in (ici | dcn).items() if getattr(config, key, 1) != value}
    # MaxText's attention refuses to cut heads of keys and values.
    if least <= stages <= most and not (heads and heads % rows_of_devices.shards(_KV_KERNEL, changed(config, changes))):
      found.append((_distance(stages, present), len(changes), changes))
  return [changes for *_, changes in sorted(found, key=operator.itemgetter(0, 1))]


def _shares(config: HostKeys, network: str) -> Iterator[dict[str, int]]:
  """Yields, for each number of stages on a network, changes that use all its devices."""
  target, asked = derived.devices_to_share(config, network), derived.parallelism(config, network)
  key = derived.parallelism_key(network, "stage")
  present, others = getattr(config, key), list[int]()
  if "stage" not in asked or any(getattr(config, derived.parallelism_key(network, a), 1) != n for a, n in asked.items()):
    target = None  # the user sets the sizes of axes by other keys
  elif target is not None:
    others = _nearest(derived.divisors(target), present)
  else:
    layers = derived.layers_to_choose_from(config) or 1
    others = _nearest(derived.divisors(max(layers, 1)), present) if network == "ici" else [1]
  for stages in dict.fromkeys(each for each in (present, *others) if each >= 1):
    if target is None:
      yield {key: stages}
    elif target % stages == 0:
      for sizes in _other_axes(asked | {"stage": stages}, target):
        yield {key: stages} | {derived.parallelism_key(network, axis): size for axis, size in sizes.items()}


def _other_axes(asked: dict[str, int], target: int) -> Iterator[dict[str, int]]:
  """Yields sizes of axes other than that of stages that use all devices: changes of no axis, of one, or of all."""
  fits = lambda others: derived.filled(asked | others, target) is not None
  if fits({}):
    yield {}
    return
  donors = [axis for axis in DONORS if axis in asked]
  for axis in dict.fromkeys([*donors, *asked]):
    rest = math.prod(size for other, size in asked.items() if size != -1 and other != axis)
    if axis == "stage" or rest < 1 or target % rest:
      continue
    left = target // rest
    for size in (left, math.gcd(left, max(asked[axis], 1))):
      if fits({axis: size}):
        yield {axis: size}
        break
  all_ = {axis: 1 for axis in asked if axis != "stage"} | dict.fromkeys(donors[:1], -1)
  if donors and fits(all_):
    yield all_


def donor(config: HostKeys, network: str) -> tuple[str | None, int]:
  """(the axis that gives its devices to stages and experts, how many it has): the one with -1, or else fsdp or data.

  The parallelism gives all devices. The axis is None if these axes have one device only.
  """
  sizes = derived.sizes_of_axes(config, network) or {}
  unset = [axis for axis, size in derived.parallelism(config, network).items() if size == -1]
  return next(((axis, sizes[axis]) for axis in (*unset, *DONORS) if sizes.get(axis, 1) > 1), (None, 1))


def ways_to_share(config: HostKeys, most: Mapping[str, int]) -> Iterator[dict[str, int]]:
  """Yields all ways to give devices of a slice to these axes. Sizes divide `most`; those of 1 are left out."""
  available = donor(config, "ici")[1]
  divisors = (derived.divisors(math.gcd(available, size)) for size in most.values())
  for sizes in itertools.product(*divisors):
    if available % math.prod(sizes) == 0:
      yield {axis: size for axis, size in zip(most, sizes, strict=True) if size > 1}


def every_parallelism(
    config: HostKeys, network: str, others: Mapping[str, int] = types.MappingProxyType({})
) -> Iterator[dict[str, int]]:
  """Yields the keys for each number of stages on a network, ascending; of a config with one stage and all devices.

  Stages take their devices from `donor`, and so do other axes, which have these sizes.
  """
  giving, available = donor(config, network)
  if giving is None:
    yield {derived.parallelism_key(network, "stage"): 1}
    return
  target = math.prod((derived.sizes_of_axes(config, network) or {}).values())
  for stages in derived.divisors(available // math.prod(others.values())):
    asked = derived.parallelism(config, network) | dict(others) | {"stage": stages}
    found = derived.filled(asked | next(_other_axes(asked, target)), target) or {}
    yield {derived.parallelism_key(network, axis): found[axis] for axis in (*others, "stage", giving)}


def layers_per_stage(layers: int, stages: int) -> list[int]:
  """All numbers of layers per stage that divide the layers of a pipeline, ascending."""
  return derived.divisors(layers // stages) if layers >= stages and layers % stages == 0 else []


def layers(config: HostKeys, given: Values) -> Iterator[dict[str, int]]:
  """Yields layers per stage, pipelined layers and repeats that fit the number of stages."""
  if derived.num_stages(config) == 1:
    yield dict(derived.without_effect(config)) if derived.windowed(config) else {}
    return
  stages, available = derived.sound_stages(config), derived.layers_to_choose_from(config)
  per_stage, asked = config.num_layers_per_pipeline_stage, derived.pipelined_layers(config)
  if available is None or asked is None:
    yield {}
    return
  present = {key: given.get(key, getattr(config, key)) for key in ("pipeline_parallel_layers", "num_pipeline_repeats")}
  present["num_layers_per_pipeline_stage"] = per_stage
  candidates = _nearest(range(1, min(available // stages, 4 * _MOST_CANDIDATES) + 1), max(per_stage, 1))
  sizes_of = {count: layers_per_stage(count, stages) for count in (asked, available)}
  choices = [(size, count) for size in candidates for count, sizes in sizes_of.items() if size in sizes]
  choices += [(size, available // (stages * size) * stages * size) for size in candidates]
  for size, count in choices:
    if not stages * size <= count <= available:
      continue
    values = {"num_layers_per_pipeline_stage": size}
    if count != asked:
      values["pipeline_parallel_layers"] = -1 if count == available else count
    if present["num_pipeline_repeats"] not in (-1, count // (stages * size)):
      values["num_pipeline_repeats"] = -1
    yield {key: value for key, value in values.items() if value != present[key]}


def of_batches(config: HostKeys) -> Iterator[dict[str, Any]]:
  """Yields microbatches and batches that fit the number of stages."""
  stages, least = derived.sound_stages(config), derived.least_microbatches(config)
  batch, asked = config.micro_batch_size_to_train_on, config.num_pipeline_microbatches
  if batch is None or batch < 0 or not config.num_target_devices:
    yield {"num_pipeline_microbatches": max(round(asked / stages) * stages, least)}
    return
  units = _units(config, evaluation=False)
  for count in microbatches(config)[:_MOST_CANDIDATES]:
    yield _with_other_batches(config, {"num_pipeline_microbatches": count})
  for count in dict.fromkeys([max(_ceil(asked, stages), least), max(asked // stages * stages, least), least]):
    for size in batches(config, count, units=units):
      yield _with_other_batches(config, {"num_pipeline_microbatches": count, "per_device_batch_size": size})


def _units(config: HostKeys, evaluation: bool) -> list[int]:
  """The numbers of which a microbatch's rows may have to be a multiple."""
  parts = rows_of_devices.parts(config)
  unit = math.lcm(parts, *(need.devices * parts for need in rows_of_devices.needs(config, evaluation=evaluation)))
  of_quantization = max(getattr(config, "quantization_local_shard_count", 1), 1)
  return list(dict.fromkeys([1, unit, 2 * unit, math.lcm(unit, of_quantization)]))


def _with_other_batches(config: HostKeys, values: dict[str, Any]) -> dict[str, Any]:
  """Adds evaluation batches and growing batches that divide into the same number of microbatches."""
  view = changed(config, values)
  devices = view.num_target_devices or 0
  others: dict[str, Any] = {}
  for key, (rows, divided_by) in derived.batches(view).items():
    evaluation = key.startswith("eval")
    if key != "per_device_batch_size" and not _enough(view, rows, divided_by, evaluation):
      for size in batches(view, divided_by, key, _units(view, evaluation)):
        if _enough(view, int(devices * size), divided_by, evaluation):
          others[key] = size
          break
  return values | others


def _enough(config: HostKeys, rows: int, divided_by: int, evaluation: bool) -> bool:
  of_part, left = divmod(rows, divided_by * rows_of_devices.parts(config))
  return rows > 0 and not left and all(need.has(of_part) for need in rows_of_devices.needs(config, evaluation=evaluation))


def pipelines(config: HostKeys, given: Values) -> Iterator[dict[str, Any]]:
  """Yields other values of keys for devices, layers and rows together, the nearest first.

  They keep the number of stages if they can, then the layers of the pipeline, then the microbatches or the batch. `given`
  is that of `remedies.changed`.
  """
  key = "num_pipeline_microbatches"
  asked = given.get(key, config.num_pipeline_microbatches)
  for of_devices in parallelism(config):
    on_devices = changed(config, of_devices, given)
    for of_layers in layers(on_devices, given):
      view = changed(on_devices, of_layers)
      for of_rows in of_batches(view):
        values = of_devices | of_layers | of_rows
        if asked == -1 and values[key] == derived.least_microbatches(view):
          values[key] = -1
        present = {each: asked if each == key else getattr(config, each) for each in values}
        yield {each: value for each, value in values.items() if value != present[each]}


def more_devices(config: DerivedKeys, kind: str | None, takes: str | None) -> Iterator[dict[str, Any]]:
  """Yields keys for twice as many devices as a run has, four times as many, and so on.

  `kind` is its compile_topology. `takes` is the key of the mesh axis within a slice that gets the devices; None if
  MaxText derives its size.
  """
  for factor in (2**doubling for doubling in range(1, _MOST_DOUBLINGS + 1)):
    if kind:
      chips, _, size = kind.partition("-")
      larger = f"{chips}-{int(size) * factor}" if size.isdigit() else ""
      if larger not in topology.topologies():
        return
      keys: dict[str, Any] = {"compile_topology": larger}
    else:
      keys = {"internal_compile_num_devices": config.num_target_devices * factor}
    yield keys if takes is None else keys | {takes: getattr(config, takes) * factor}

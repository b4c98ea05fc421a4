# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""What is wrong with the sizes of a pipeline: stages, layers, microbatches, rows of batches, iterations, devices."""

from collections.abc import Iterator
import math

from maxtext_pp_ext import registry
from maxtext_pp_ext.config import derived
from maxtext_pp_ext.config.derived import num_stages, stages_text
from maxtext_pp_ext.config.host_keys import HostKeys
from maxtext_pp_ext.config.keys import Keys, remat_tensors
from maxtext_pp_ext.config.remedies import Problem, Remedy
from maxtext_pp_ext.host.models import flops, run_config
from maxtext_pp_ext.host.rules import candidates
from maxtext_pp_ext.host.rules import rows as rows_of_devices
from maxtext_pp_ext.nearest import beside
from maxtext_pp_ext.units import counted


def problems(config: Keys) -> list[Problem]:
  """Returns all problems with sizes, except those of `devices`."""
  rules = (_stages, _one_slice, _layers, _microbatches, _batch, _other_batches, of_rows)
  return [problem for rule in rules for problem in rule(config)]


def _stages(config: Keys) -> Iterator[Problem]:
  for key in ("ici_pipeline_parallelism", "dcn_pipeline_parallelism"):
    if (value := getattr(config, key)) < 1:
      what = f"{key}={value}: MaxText does not derive the number of stages."
      yield Problem(what, otherwise=f"{key} to a number of at least 1")


def _one_slice(config: Keys) -> Iterator[Problem]:
  """The problem with axes over slices where there is one slice. MaxText's own error names no key."""
  # MaxText does not ask for slices for DiLoCo's axis.
  names = (derived.parallelism_key("dcn", axis) for axis in config.mesh_axes if axis != "diloco")
  over = {key: size for key in names if (size := getattr(config, key, 1)) > 1}
  if over and getattr(config, "num_slices", None) == 1:
    asked = " × ".join(f"{key}={size}" for key, size in over.items())
    key = "compile_topology_num_slices" if getattr(config, "compile_topology", "") else "num_slices"
    yield Problem(f"{asked} needs more slices than there are ({key}=1).", dict.fromkeys(over, 1))


def layers_outside(config: HostKeys) -> int:
  """The layers that could be in the pipeline and run outside; 0 if their number is not known."""
  layers, available = derived.pipelined_layers(config), derived.layers_to_choose_from(config)
  return 0 if layers is None or available is None else available - layers


def _layers_text(config: Keys) -> str:
  available = f"num_decoder_layers={config.num_decoder_layers}"
  if derived.is_deepseek(config):
    available += f" − first_num_dense_layers={config.first_num_dense_layers}"
  return f"{derived.pipelined_layers(config)} pipelined layers (pipeline_parallel_layers, by default {available})"


def _layers(config: Keys) -> Iterator[Problem]:
  stages, layers = num_stages(config), derived.pipelined_layers(config)
  available, per_stage = derived.layers_to_choose_from(config), config.num_layers_per_pipeline_stage
  if per_stage < 1:
    yield Problem(f"num_layers_per_pipeline_stage={per_stage} must be at least 1.", {"num_layers_per_pipeline_stage": 1})
    return
  if stages == 1:
    for key, only in derived.without_effect(config).items():
      what = f"{key}={getattr(config, key)} has no effect without a pipeline"
      yield Problem(f"{what} (ici_pipeline_parallelism=1, dcn_pipeline_parallelism=1).", {key: only})
    return
  if layers is None or available is None or stages is None:
    return
  group = stages * per_stage
  group_text = f"{stages_text(config)} × num_layers_per_pipeline_stage={per_stage} = {group}"
  if layers > available:
    yield Problem(
        f"pipeline_parallel_layers={layers} is more than the model has: {available}.",
        *([{"pipeline_parallel_layers": available // group * group}] if available >= group else []),
        Remedy({"pipeline_parallel_layers": -1}, " for all layers"),
    )
  elif layers < group:
    yield Problem(
        f"{_layers_text(config)} are fewer than {group_text}.",
        otherwise=f"ici_pipeline_parallelism × dcn_pipeline_parallelism × num_layers_per_pipeline_stage to at most "
        f"{layers}, or base_num_decoder_layers so that {group} layers result",
    )
  elif layers % group:
    kept = layers // group * group
    outside = f" (the other {available - kept} then run outside the pipeline on every stage)"
    yield Problem(
        f"{_layers_text(config)} cannot be divided among {group_text}.",
        Remedy({"pipeline_parallel_layers": kept}, outside),
        otherwise=f"ici_pipeline_parallelism × dcn_pipeline_parallelism × num_layers_per_pipeline_stage to a divisor of "
        f"{layers}",
    )
  elif config.num_pipeline_repeats not in (-1, layers // group):
    repeats = config.num_pipeline_repeats
    yield Problem(
        f"num_pipeline_repeats={repeats} × {group_text} is {repeats * group}, not the {_layers_text(config)}.",
        {"num_pipeline_repeats": layers // group},
        Remedy({"num_pipeline_repeats": -1}, " to have it derived"),
    )


def _microbatches(config: Keys) -> Iterator[Problem]:
  stages, microbatches = num_stages(config), config.num_pipeline_microbatches
  if stages is None or microbatches == -1:
    return
  delay, least = derived.forwarding_delay(config), derived.least_microbatches(config)
  nearest = beside(microbatches, candidates.microbatches(config)) or [max(-(-microbatches // stages) * stages, least)]
  what = []
  if microbatches % stages or microbatches < 1:
    what.append(f"is not a multiple of {stages_text(config)}; every stage must keep equally many.")
  if microbatches < least:
    why = " with pipeline_delay_activation_forwarding=True" if delay == 2 else ""
    what.append(
        f"is fewer than {least} = {delay} × {stages_text(config)}{why}: a microbatch needs that many iterations to "
        "return to the first stage."
    )
  if what:
    yield Problem(
        f"num_pipeline_microbatches={microbatches} {' It '.join(what)}",
        *({"num_pipeline_microbatches": count} for count in nearest),
        *([] if least in nearest else [Remedy({"num_pipeline_microbatches": -1}, f" for {least}")]),
    )


def _batch(config: Keys) -> Iterator[Problem]:
  batch, stages = config.micro_batch_size_to_train_on, num_stages(config)
  if batch is None or batch < 0 or stages is None or _one_part(config):
    return
  least = derived.least_microbatches(config)
  microbatches = least if config.num_pipeline_microbatches == -1 else config.num_pipeline_microbatches
  if microbatches % stages or microbatches < least:
    if derived.fitting_microbatches(config):
      return  # `_microbatches` proposes one of those
    microbatches = least
  elif batch > 0 and batch % microbatches == 0:
    return
  yield Problem(
      f"a batch of {counted(batch, 'row')} (int(num_target_devices={config.num_target_devices} × per_device_batch_size="
      f"{config.per_device_batch_size})) cannot be divided into {counted(microbatches, 'microbatch')} "
      f"(num_pipeline_microbatches, by default {least}).",
      *[{"num_pipeline_microbatches": m} for m in candidates.microbatches(config)[:1]],
      *[{"per_device_batch_size": size} for size in candidates.batches(config, microbatches)[:1]],
  )


def _one_part(config: Keys) -> bool:
  """Whether the batch stays whole, without a pipeline: then its rows are MaxText's business."""
  return num_stages(config) == 1 and config.num_pipeline_microbatches in (-1, 1)


def _sound_batches(config: Keys) -> dict[str, tuple[int, int]]:
  """Returns `derived.batches`; {} if the rows of a step do not divide, which another rule reports."""
  batch, microbatches = config.micro_batch_size_to_train_on, config.num_pipeline_microbatches
  sound = num_stages(config) is not None and microbatches >= 1 and not _one_part(config)
  return {} if batch is None or batch < 1 or not sound or batch % microbatches else derived.batches(config)


def _other_batches(config: Keys) -> Iterator[Problem]:
  """Checks evaluation batches and growing batches. The pipeline divides them into the same number of microbatches."""
  for key, (rows, divided_by) in _sound_batches(config).items():
    if rows >= 1 and rows % divided_by == 0:
      continue
    of = f"int(num_target_devices={config.num_target_devices} ×"
    of_batch = [{key: size} for size in candidates.batches(config, divided_by, key)[:1]]
    if key == "eval_per_device_batch_size":
      fitting = [m for m in derived.fitting_microbatches(config)[::-1] if 0 < rows and rows % m == 0]
      yield Problem(
          f"an evaluation's batch of {counted(rows, 'row')} ({of} {key}={getattr(config, key)})) cannot be divided into "
          f"{counted(divided_by, 'microbatch')} (num_pipeline_microbatches, which applies to evaluations, too).",
          *of_batch,
          *[{"num_pipeline_microbatches": m} for m in fitting[:1]],
          {"eval_interval": -1},
      )
    else:
      value, accumulated = getattr(config, key), config.gradient_accumulation_steps
      yield Problem(
          f"enable_rampup_batch_size=True with {key}={value}: {counted(rows, 'row')} ({of} {value})) cannot be divided "
          f"into gradient_accumulation_steps={accumulated} × num_pipeline_microbatches={divided_by // accumulated} "
          "microbatches.",
          *of_batch,
          {"enable_rampup_batch_size": False},
      )


def of_rows(config: Keys, platform: str | None = None) -> Iterator[Problem]:
  """Checks that rows of microbatches divide among the devices that need some; `platform` as in `rows.needs`."""
  parts = rows_of_devices.parts(config)
  replicas = (getattr(config, "num_diloco_replicas", None) or 1) if getattr(config, "enable_diloco", False) else 1
  for key, (batch, divided_by) in _sound_batches(config).items():
    batch //= replicas
    if batch < 1 or batch % divided_by:
      continue  # another rule reports that
    rows = batch // divided_by
    for need in rows_of_devices.needs(config, evaluation=key.startswith("eval"), platform=platform):
      if rows % parts == 0 and not need.has(rows // parts):
        yield _too_few_rows(config, key, batch, divided_by, need)


def _too_few_rows(config: Keys, key: str, batch: int, divided_by: int, need: rows_of_devices.Need) -> Problem:
  parts, microbatches = rows_of_devices.parts(config), config.num_pipeline_microbatches
  of = f"{batch} / num_pipeline_microbatches={microbatches}"
  of += f" / gradient_accumulation_steps={config.gradient_accumulation_steps}" if divided_by != microbatches else ""
  of += f" / batch_split_factor={parts}" if parts > 1 else ""
  over = " × ".join(f"{axis}={size}" for axis, size in need.axes.items())
  wants = f"needs equally many rows on each of {need.devices} devices ({over or 'one'})"
  wants += " and at least two in all" if need.least > 1 and need.devices == 1 else ""
  unit = need.devices * parts
  kinds = {
      "per_device_batch_size": ("a microbatch", []),
      "eval_per_device_batch_size": ("an evaluation's microbatch", [{"eval_interval": -1}]),
  }
  kind, off = kinds.get(key, ("a microbatch of the growing batch", [{"enable_rampup_batch_size": False}]))
  return Problem(
      f"{need.what} {wants}, but {kind} of {key}={getattr(config, key)} has {batch // divided_by // parts} ({of}).",
      *[{"num_pipeline_microbatches": m} for m in candidates.microbatches(config)],
      *[{key: size} for size in candidates.batches(config, divided_by, key, (unit, 2 * unit))],
      *off,
      need.instead,
  )


def devices(config: Keys) -> Iterator[str]:
  """Yields the problems with the parallelism for a mesh of all devices, as trainers make it."""
  count, slices = config.num_target_devices, getattr(config, "num_slices", 1)
  if count and count > 0 and slices > 0 and count % slices:
    fewer = max(size for size in derived.divisors(count) if size < slices)
    yield (
        f"num_slices={slices} slices cannot share num_target_devices={count} equally. Leave num_slices out, or set one "
        f"that divides them, such as num_slices={fewer}."
    )
    return
  for network in derived.NETWORKS if num_stages(config) is not None else ():
    target, asked = derived.devices_to_share(config, network), derived.parallelism(config, network)
    if target is None or derived.filled(asked, target) is not None:
      continue
    keys = {derived.parallelism_key(network, axis): size for axis, size in asked.items() if size != 1 or axis == "stage"}
    of = f"num_target_devices={count}" + (f" / num_slices={slices}" if slices > 1 else "")
    kind = f"{counted(target, 'device')} ({of})" if network == "ici" else f"{counted(target, 'slice')} (num_slices)"
    product = " × ".join(f"{key}={size}" for key, size in keys.items())
    unit = "" if -1 in keys.values() else f" = {math.prod(keys.values())}"
    yield Problem(f"{kind} cannot be divided as {product}{unit}.", *filter(None, candidates.parallelism(config)))


def rematerialised(config: Keys) -> Iterator[str]:
  """Yields all problems with rematerialisation in a part of the iterations, with one of our implementations."""
  count, names = config.pipeline_remat_iterations, remat_tensors(config)
  chosen, tensors = f"pipeline_remat_iterations={count}", f"pipeline_remat_tensors={config.pipeline_remat_tensors}"
  if count < 0:
    yield f"{chosen} must be at least 0. Set pipeline_remat_iterations=0."
  if count < 1:
    if names:
      yield (
          f"{tensors} has no effect with {chosen}. Set pipeline_remat_iterations to a number of iterations, or leave "
          "pipeline_remat_tensors out."
      )
    return
  policy = config.remat_policy or "none"
  if policy == "none" or flops.recomputes_layers(config):
    keeps = "does not choose tensors" if policy == "none" else "keeps only layers' inputs"
    yield (
        f"{chosen}: remat_policy={policy} {keeps}. Leave pipeline_remat_iterations out, or set a remat_policy that keeps "
        "tensors, such as minimal."
    )
  if config.pipeline_impl in registry.names() and not registry.get(config.pipeline_impl).contract.gather_policy:
    yield f"{chosen} has no effect with pipeline_impl={config.pipeline_impl}. Leave pipeline_remat_iterations out."
  if not derived.windowed(config) and not config.set_remat_policy_on_pipeline_iterations:
    yield (
        f"{chosen}: set_remat_policy_on_pipeline_iterations=False keeps everything in all iterations. Set it to True, or "
        "leave pipeline_remat_iterations out."
    )
  if (iterations := _iterations(config)) is not None and count > iterations:
    yield (
        f"{chosen} is more than the {iterations} iterations of forward. Set pipeline_remat_iterations to at most "
        f"{iterations}."
    )
  if policy == "custom":
    kept = [*(config.tensors_on_device or ()), *(config.tensors_to_offload or ())]
    if others := [name for name in names if name not in kept]:
      yield (
          f"{tensors}: remat_policy=custom does not keep {', '.join(others)}, only {', '.join(kept) or 'nothing'}. Set "
          "pipeline_remat_tensors to some of these."
      )


def _iterations(config: Keys) -> int | None:
  """T; None if sizes are missing or unsound, which other rules report."""
  try:
    return None if config.num_decoder_layers is None else run_config.schedule_of(config).iterations
  except ValueError:
    return None

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Checks a run's config without compiling it, on a machine without its devices."""

from collections.abc import Sequence
import dataclasses

from maxtext_pp_ext import units
from maxtext_pp_ext.checkpoint.layout import Layout
from maxtext_pp_ext.config import PipelineConfigError
from maxtext_pp_ext.config.derived import flags_missing_in_run, pipeline_impl, sound_stages, windowed
from maxtext_pp_ext.config.keys import DerivedKeys, Keys
from maxtext_pp_ext.hardware import chips
from maxtext_pp_ext.host.models import abstract_model, layouts, run_config
from maxtext_pp_ext.host.rules import checkpoint_paths, problems, sizes
from maxtext_pp_ext.plan import quantities
from maxtext_pp_ext.plan.costs import Costs
from maxtext_pp_ext.plan.estimate import Estimate
from maxtext_pp_ext.plan.layers import layers_of
from maxtext_pp_ext.schedule import Schedule
from maxtext_pp_ext.sharding.conflicts import by_problem


@dataclasses.dataclass(kw_only=True)
class Checked:
  """The result of a check."""

  # Reasons why it cannot be trained; if there are any, the rest may be missing.
  errors: list[str] = dataclasses.field(default_factory=list)
  warnings: list[str] = dataclasses.field(default_factory=list)  # effects that a user may not expect
  devices: int | None = None  # number of devices that the run is for
  layout: str | None = None  # the layout in words
  # For each layer of the model, in order, (stage, repeat), or None outside the pipeline.
  layers: list[tuple[int, int] | None] = dataclasses.field(default_factory=list)
  schedule: Schedule | None = None  # schedule of the pipeline; None without one
  costs: Costs | None = None  # costs per device and step; None if there are no formulas for the pipeline
  estimate: Estimate | None = None  # of the seconds of a step; None if the device or its slice is not known
  device_memory: int | None = None  # bytes of a device; None if `compile_topology` does not say which devices they are
  flags: list[str] = dataclasses.field(default_factory=list)  # of compile_xla_flags, which a run would not have
  not_counted: list[str] = dataclasses.field(default_factory=list)  # what takes memory or traffic and is not in the costs


def check(argv: Sequence[str], devices: int | None = None, *, files: bool = True) -> Checked:
  """Checks MaxText's arguments of a run: a yml file, which may be left out, then `key=value`.

  `devices` is their number, by default those of `compile_topology`, or as many as the parallelism makes. `files` says
  whether the run reads and writes checkpoints where the arguments say. Raises OSError if the yml file does not exist.
  """
  found = Checked()
  try:
    given = run_config.given_keys(argv)
    overrides = run_config.of_absent_devices(given, devices)
    found.devices = overrides.get("internal_compile_num_devices")
    # The values as given, since the config is read without checkpoints.
    found.errors += [*checkpoint_paths.problems(given.get), *checkpoint_paths.of_loading(given.get)] if files else []
    config = run_config.read_without_run(argv, **overrides)
  except (ValueError, NotImplementedError) as error:
    of_config = error.problems if isinstance(error, PipelineConfigError) else [str(error)]
    found.errors += [problem for problem in of_config if problem not in found.errors]
    return found
  found.devices = config.num_target_devices
  found.warnings += _warnings(config)
  found.flags = flags_missing_in_run(config)
  of_mesh = problems.of_mesh(config, given)
  found.errors += of_mesh
  try:
    _model(config, found)
  except (ValueError, NotImplementedError) as error:
    found.errors += [] if of_mesh else [str(error)]  # without a mesh there is no model
  return found


def _warnings(config: Keys) -> list[str]:
  """Silent defects of MaxText's own pipelines (0.2.5), or what ours would have on TPUs if no devices are named."""
  if pipeline_impl(config) != "host":
    on_tpus = () if config.compile_topology else sizes.of_rows(config, "tpu")
    return [str(problem) for problem in on_tpus if problem not in sizes.problems(config)]
  if not config.using_pipeline_parallelism or not config.pipeline_fsdp_ag_per_repeat or sound_stages(config) <= 2:
    return []
  return [
      f"pipeline_fsdp_ag_per_repeat=True with {sound_stages(config)} stages: MaxText 0.2.5 computes wrong values "
      "with 3 or more stages. Set pipeline_fsdp_ag_per_repeat=False and pipeline_impl=circular_bsw."
  ]


def _model(config: DerivedKeys, found: Checked) -> None:
  if config.use_m3_model:
    found.not_counted = ["memory and traffic, since use_m3_model=True makes a model whose layers are not read"]
    return
  layout = layouts.of_config(config)
  found.layout, found.layers = layout.description, _places(layout, config)
  if config.using_pipeline_parallelism or windowed(config):
    found.schedule = run_config.schedule_of(config)
  parameters, mesh = abstract_model.explained(config)
  (found.errors if config.sharding_conflicts == "error" else found.warnings).extend(
      f"{problem}. {remedy} (sharding of {'; '.join(arrays)})"
      for (_, problem, remedy), arrays in by_problem(parameters.conflicts).items()
  )
  impl = pipeline_impl(config)
  if found.schedule is not None and quantities.gather_policy_with_formulas(impl) is None:
    found.not_counted = [f"memory and traffic, since there are no formulas for pipeline_impl={impl}"]
    return
  try:
    layers = layers_of(config)
  except ValueError as error:
    found.not_counted = [f"memory and traffic, since the layers cannot be traced for TPUs: {error}"]
    return
  chip = chips.of_topology(config.compile_topology or "")
  # There are formulas, so it is not None.
  found.costs, found.estimate = quantities.predictor(config, parameters, mesh, chip, layers)(impl, found.schedule)  # type: ignore[misc]
  found.not_counted = quantities.not_counted(config)
  found.device_memory = chip.hbm_bytes if chip else None
  if chip and not found.not_counted and found.costs.peak > chip.hbm_bytes:  # nothing is left out of the estimate
    found.warnings.append(
        f"It does not fit into the memory of a device, as estimated: {units.bytes_text(found.costs.peak)} of "
        f"{units.bytes_text(chip.hbm_bytes)}. `maxtext-pp plan` has other ways to run it, and if none fits, the keys "
        "that would make one fit."
    )
  if chip and found.costs.on_host > chip.host_bytes:
    found.warnings.append(
        "What is offloaded does not fit into the host's memory, as estimated: "
        f"{units.bytes_text(found.costs.on_host)} of {units.bytes_text(chip.host_bytes)} for a device."
    )


def _places(layout: Layout, config: DerivedKeys) -> list[tuple[int, int] | None]:
  """Returns (stage, repeat) of each layer, read off the arrays of the model."""
  places: list[tuple[int, int] | None] = [None] * layout.number_of_layers
  for leaf in layout.leaves:
    if leaf.name is None or leaf.path[:2] != ("decoder", "pipeline_module") or leaf.is_random_state:
      continue
    for layer, index in leaf.layers():
      places[layer] = (index[1], index[0]) if config.num_pipeline_repeats > 1 else (index[0], 0)
  return places

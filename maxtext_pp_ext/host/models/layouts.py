# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Finds the decoder layers in the arrays of a config's model, read off the model itself, built without arrays.

The decoder's `get_layers` returns its stacks of layers in the order in which they run. In scanned modules, parameters are
stacked along `param_scan_axis`, and other state along the first axis. The axes of a pipeline's stages come before these.
"""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import math
import re
import tempfile
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from maxtext_pp_ext import registry
from maxtext_pp_ext.checkpoint import complete, guess, moves
from maxtext_pp_ext.checkpoint.layout import axes_of_stack, LayerAxis, Layout, LayoutError, Leaf, Path
from maxtext_pp_ext.config import PipelineConfigError
from maxtext_pp_ext.config.derived import decoder_block, layers_to_choose_from, sound_stages
from maxtext_pp_ext.config.host_keys import HostKeys
from maxtext_pp_ext.config.keys import DerivedKeys
from maxtext_pp_ext.config.view import with_values
from maxtext_pp_ext.host.models import abstract_model, cycles, run_config
from maxtext_pp_ext.host.models.run_config import integer
from maxtext_pp_ext.schedule import CircularSchedule, GatherPolicy, Schedule
from maxtext_pp_ext.units import counted

# The parallelism on which a layout depends. All other parallelism shards arrays, and leaves their shapes.
STAGES, DCN_STAGES = "ici_pipeline_parallelism", "dcn_pipeline_parallelism"
# One absent device per stage, and neutral values for keys on which a layout does not depend.
_NO_RUN = {
    **dict.fromkeys(("internal_compile", "skip_jax_distributed_system"), True),
    **dict.fromkeys(("enable_checkpointing", "log_config", "enable_rampup_batch_size"), False),
    **dict.fromkeys(("use_batch_split_schedule", "pipeline_delay_activation_forwarding"), False),
    **dict.fromkeys(("context_parallel_load_balance", "pipeline_fsdp_ag_once", "pipeline_fsdp_ag_per_repeat"), False),
    **dict.fromkeys(("load_parameters_path", "load_full_state_path", "compile_topology"), ""),
    **dict.fromkeys(("gradient_accumulation_steps", "num_slices", "quantization_local_shard_count"), 1),
    **dict.fromkeys(("pipeline_grad_accum_dtype", "pipeline_gather_dtype", "shard_mode"), "auto"),
    **dict.fromkeys(("adamw_mask", "trainable_parameters_mask"), []),
    **{"pipeline_remat_iterations": 0, "pipeline_remat_tensors": ""},
    **{"opt_type": "adamw", "dataset_type": "synthetic", "eval_interval": -1, "run_name": "layout"},
    "base_output_directory": tempfile.gettempdir(),
}


def config_of_layout(argv: Sequence[str], **replaced: Any) -> Any:
  """MaxText's config for the model of these arguments, whatever devices they are for.

  `replaced` has values for keys; the number of stages is `ici_pipeline_parallelism`. Raises ValueError if it is refused.
  """
  from maxtext.configs import types  # pylint: disable=import-outside-toplevel

  fields = types.MaxTextConfig.model_fields
  fixed = {key: value for key, value in _NO_RUN.items() if key in fields}
  fixed |= {key: 1 for key in fields if run_config.PARALLELISM.fullmatch(key)}
  given = run_config.given_keys(argv)
  given = given | ({DCN_STAGES: 1} if STAGES in replaced else {}) | replaced
  stages = integer(given, STAGES) * integer(given, DCN_STAGES)
  replaced = {key: value for key, value in replaced.items() if key not in (STAGES, DCN_STAGES)}
  fixed |= {STAGES: stages, "internal_compile_num_devices": stages}
  fixed |= {"num_pipeline_microbatches": stages, "per_device_batch_size": 1, "eval_per_device_batch_size": 1}
  of_host = fixed | replaced | {"pipeline_impl": registry.HOST}
  asked = str(given.get("pipeline_impl", registry.HOST))
  if stages != 1:
    try:
      return run_config.read(argv, **of_host | {"pipeline_impl": "circular_bsw" if asked == registry.HOST else asked})
    except PipelineConfigError:
      if asked != registry.HOST:
        raise
  return run_config.read(argv, **of_host)


def schedule_of_run(argv: Sequence[str]) -> Schedule:
  """The schedule of a run, whose devices may be absent. Raises ValueError if it has neither a pipeline nor a window."""
  given = run_config.given_keys(argv)
  run_config.refuse_numbers(given)  # of which most are replaced below
  for key in (STAGES, DCN_STAGES):
    if (stages := integer(given, key)) < 1:
      raise ValueError(f"{key}={stages}: MaxText does not derive the number of stages. Set {key} to it.")
  config = config_of_layout(argv)
  microbatches, asked = integer(given, "num_pipeline_microbatches", -1), str(given.get("pipeline_impl", registry.HOST))
  if not config.using_pipeline_parallelism:
    if asked == registry.HOST:
      raise ValueError(
          "These arguments ask for no pipeline. Set ici_pipeline_parallelism, or for a window without a pipeline "
          "pipeline_impl=circular_bsw."
      )
    return run_config.schedule_of(
        with_values(config, {"pipeline_impl": asked, "num_pipeline_microbatches": microbatches})
    )
  stages = sound_stages(config)
  delay = 2 if given.get("pipeline_delay_activation_forwarding") else 1
  return CircularSchedule(
      stages=stages,
      microbatches=delay * stages if microbatches == -1 else microbatches,  # MaxText's own default
      repeats=config.num_pipeline_repeats,
      delay=delay,
      over_slices=integer(given, DCN_STAGES) > 1,
  )


def gather_policy_of_run(argv: Sequence[str]) -> GatherPolicy | None:
  """How long the implementation of a run keeps gathered weights; None: it does not say. Raises as `registry.get` does."""
  given = run_config.given_keys(argv)
  if (name := str(given.get("pipeline_impl", registry.HOST))) != registry.HOST:
    return registry.get(name).contract.gather_policy
  if given.get("pipeline_fsdp_ag_per_repeat"):
    return GatherPolicy.REPEAT
  return GatherPolicy.ONCE if given.get("pipeline_fsdp_ag_once") else GatherPolicy.ITERATION


def of_config(config: Any, *kinds: type) -> Layout:
  """The layout of a config's model, built without arrays: of variables of these kinds, by default all that MaxText saves.

  Raises LayoutError if the model's layers are not where this version of the package expects them.
  """
  model = abstract_model_of(config)
  places = _places(model.decoder)
  wanted = nnx.Any(*kinds) if kinds else nnx.Not(nnx.Any(nnx.Cache, nnx.Intermediate))
  variables = nnx.to_flat_state(nnx.state(model, wanted))
  leaves = tuple(_leaf(tuple(map(str, path)), each, places, config.param_scan_axis) for path, each in variables)
  layout = Layout(leaves=leaves, description=describe(config))
  if layout.number_of_layers != config.num_decoder_layers:
    raise LayoutError(
        f"{layout.number_of_layers} layers of MaxText's decoder were found, but num_decoder_layers="
        f"{config.num_decoder_layers} (decoder_block={decoder_block(config)})."
    )
  return layout


def of_checkpoint(
    argv: Sequence[str],
    shapes: Mapping[Path, tuple[int, ...]],
    *,
    scan_layers: bool | None,
    given: Mapping[str, Any],
    wanted: Layout,
) -> tuple[Any, Layout]:
  """(config, layout) of a checkpoint of this model, whatever layout (`wanted`) the arguments themselves ask for.

  `shapes` are the checkpoint's arrays, and `scan_layers` is MaxText's note of this key in it, None without one. Keys in
  `given` are known and not guessed. Raises LayoutError if the checkpoint is not of this model, may have several layouts,
  or has a form that cannot be converted.
  """
  if why_not := complete.why_not_converted({path[0] for path in shapes}):
    raise LayoutError(why_not)
  layers = layers_to_choose_from(config_of_layout(argv)) or 0
  wrong = []
  found: dict[tuple[Leaf, ...], tuple[Any, Layout]] = {}
  for guessed in guess.candidates(shapes, layers=layers, scan_layers=scan_layers, of_layer=wanted.of_layer):
    values = guessed | dict(given)
    try:
      config = config_of_layout(argv, **values)
      layout = of_config(config)
      moves.plan(shapes, layout, wanted)
    except ValueError as error:
      wrong.append(f"{' '.join(f'{key}={value}' for key, value in values.items())}: {error}")
    else:
      found.setdefault(layout.leaves, (config, layout))
  if len(found) == 1:
    return next(iter(found.values()))
  if found:
    several = "; ".join(layout.description for _, layout in found.values())
    raise LayoutError(f"The checkpoint may have one of several layouts ({several}): give its keys with --from.")
  raise LayoutError("\n  ".join(["The checkpoint is not of this model in any layout:", *wrong]))


def describe(config: DerivedKeys) -> str:
  """The layout in words."""
  along_axis = f"stacked along param_scan_axis={config.param_scan_axis}"
  scanned = along_axis if config.scan_layers else "not stacked"
  if not config.using_pipeline_parallelism:
    layers = config.num_decoder_layers
    stacked = math.prod(cycles.scanned(config)) if config.scan_layers else 0
    parts = [f"{counted(stacked, 'layer')} {scanned}"] if stacked else []
    if layers > stacked:
      parts.append(f"{layers - stacked if stacked else counted(layers, 'layer')} not stacked")
    return ", ".join([*parts, "no pipeline"])
  stages, per_stage = sound_stages(config), config.num_layers_per_pipeline_stage
  sizes = {"stage": stages, "repeat": config.num_pipeline_repeats, "layer": per_stage}
  text = "pipeline of " + " × ".join(counted(number, of) for of, number in sizes.items())
  text += f" {along_axis}" if per_stage > 1 and config.scan_layers_per_stage else ""
  outside = config.num_decoder_layers - stages * config.num_pipeline_repeats * per_stage
  return f"{text}, {counted(outside, 'layer')} outside, {scanned}" if outside else text


def abstract_model_of(config: Any) -> Any:
  # Shapes do not depend on the mesh, so a mesh of one device is enough.
  mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape([1] * len(config.mesh_axes)), config.mesh_axes)
  return abstract_model.abstract_model(config, mesh)


_PIPELINE, _SCAN = "pipeline", "scan"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Place:
  """One layer, or several that are stacked in the same arrays."""

  path: tuple[str, ...]  # names that lead there
  first: int = 0  # number of the first layer
  stacks: tuple[tuple[str, int, int], ...] = ()  # (kind, size, layers in an entry), from the outermost to the innermost

  @property
  def count(self) -> int:
    return math.prod(size for _, size, _ in self.stacks)


def _places(decoder: Any) -> list[_Place]:
  """The decoder's layers, in the order in which they run."""
  if not hasattr(decoder, "get_layers"):
    raise LayoutError(f"{type(decoder).__name__} does not list its layers, as MaxText's m3 models do not (use_m3_model).")
  config, pipeline = decoder.config, getattr(decoder, "pipeline_module", None)
  paths: dict[int, tuple[str, ...]] = {id(module): (name,) for name, module in vars(decoder).items()}
  if pipeline is not None:
    paths[id(pipeline.layers)] = ("pipeline_module", "layers")
  found: list[list[_Place]] = []
  kinds, modules = set(), decoder.get_layers()
  _, key_of_singles = cycles.FIXED.get(decoder_block(config), (0, ""))
  singles_first = bool(config.scan_layers and key_of_singles)
  if singles_first:  # MaxText runs them before those that it scans over, and lists them last
    modules = sorted(modules, key=lambda module: not re.search(r"_\d+$", paths[id(module)][0]))
  for module in modules:
    path = ("decoder", *paths[id(module)])
    if path[1] == "pipeline_module":
      repeats, around = config.num_pipeline_repeats, (_PIPELINE,) * (1 + (config.num_pipeline_repeats > 1))
      places = _stacked(_within(module, path, config, around), _PIPELINE, sound_stages(config))
      places = _stacked(places, _PIPELINE, repeats) if repeats > 1 else places
    elif config.scan_layers and path[1] != "layers_remainder" and not re.search(r"_\d+$", path[1]):
      kinds.add("stacked")
      places = _in_scan(module, path, config, ())
    else:
      kinds.add("single" if path[1] != "layers_remainder" else "remainder")
      places = _within(module, path, config, ())
    found.append(places)
  if {"stacked", "single"} <= kinds and not singles_first:
    raise LayoutError(
        "Some of the decoder's layers are stacked and others are not; their order is not known "
        f"(decoder_block={decoder_block(config)})."
    )
  return _one_after_another(found)


def _one_after_another(found: Iterable[list[_Place]]) -> list[_Place]:
  """Places of several modules, each of which begins to count its layers at 0."""
  places: list[_Place] = []
  for each in found:
    layers = sum(place.count for place in places)
    places += [dataclasses.replace(place, first=place.first + layers) for place in each]
  return places


def _stacked(places: list[_Place], kind: str, size: int) -> list[_Place]:
  """Places repeated `size` times, one after another, in a stack."""
  count = sum(place.count for place in places)
  return [dataclasses.replace(place, stacks=((kind, size, count), *place.stacks)) for place in places]


def _in_scan(module: Any, path: tuple[str, ...], config: HostKeys, around: tuple[str, ...]) -> list[_Place]:
  """The places of a scanned module's layers or blocks; `around`: the kinds of the stacks around this one."""
  places = _within(module, path, config, (*around, _SCAN))
  inner = places[0].path[len(path) :]
  kinds = (*around, _SCAN, *(kind for kind, _, _ in places[0].stacks))
  asked = [None if kind == _PIPELINE else config.param_scan_axis for kind in kinds]
  # Any parameter tells the size. `_leaf` checks that each array agrees.
  for name, variable in nnx.to_flat_state(nnx.state(module, nnx.Param)):
    if tuple(map(str, name))[: len(inner)] == inner:
      shape = variable.get_value().shape
      return _stacked(places, _SCAN, shape[axes_of_stack(asked, len(shape))[len(around)]])
  raise LayoutError(f"{'/'.join(path)} of MaxText's model has no parameters.")


def _within(module: Any, path: tuple[str, ...], config: HostKeys, around: tuple[str, ...]) -> list[_Place]:
  """The layers of one entry of a stack: a layer, a block of several, or a pipeline's stage."""
  from maxtext_pp_ext.host.models import decoder_layers  # pylint: disable=import-outside-toplevel

  if not decoder_layers.holds_layers(module):
    return [_Place(path=path)]
  return _one_after_another(
      (_in_scan if is_stack else _within)(getattr(module, name), (*path, name), config, around)
      for name, is_stack in decoder_layers.children(module)
  )


def _leaf(path: tuple[str, ...], variable: Any, places: list[_Place], scan_axis: int) -> Leaf:
  shape = tuple(variable.get_value().shape)
  is_random_state = isinstance(variable, nnx.RngState)
  is_floating = None if is_random_state else bool(jnp.issubdtype(variable.get_value().dtype, jnp.floating))
  leaf = Leaf(path=path, shape=shape, is_random_state=is_random_state, is_floating=is_floating)
  if (place := next((place for place in places if path[: len(place.path)] == place.path), None)) is None:
    return leaf
  of_scan = scan_axis if isinstance(variable, nnx.Param) else None  # other state is stacked along the first axis
  axes = axes_of_stack([None if kind == _PIPELINE else of_scan for kind, _, _ in place.stacks], len(shape))
  sizes = tuple(size for _, size, _ in place.stacks)
  if tuple(shape[axis] for axis in axes) != sizes:
    raise LayoutError(
        f"{'/'.join(path)} of MaxText's model has the shape {list(shape)}, but its axes {list(axes)} were expected to "
        f"count {list(sizes)} layers."
    )
  return dataclasses.replace(
      leaf,
      name=path[len(place.path) :],
      first=place.first,
      axes=tuple(LayerAxis(axis=axis, stride=stride) for axis, (_, _, stride) in zip(axes, place.stacks, strict=True)),
  )

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The parts of seams that MaxText may lack: without one, a run that needs it is refused, and all others work."""

from collections.abc import Callable, Iterable, Iterator
import functools
import inspect
from types import ModuleType
from typing import Any

from maxtext_pp_ext.config import derived
from maxtext_pp_ext.host.seams import rebind, version
from maxtext_pp_ext.host.seams.seam import Feature

CREATE_PIPELINE = "(config, layers=None, mesh=None, remat_policy=None)"
# Other parameters are refused where they have a value (`scanned_layers`).
SCAN_PARAMETERS = ("self", "layers", "x_in", "args", "length", "kwargs")
ABSTRACT_MODEL = ("config", "mesh", "devices", "model_mode", "rng_key", "quant_mode_str")
# The arguments of loading a checkpoint that we read.
LOAD_PARAMETERS = (
    "checkpoint_manager",
    "load_parameters_from_path",
    "load_full_state_from_path",
    "abstract_unboxed_pre_state",
    "step",
    "source_checkpoint_layout",
    "maxtext_config",
)
RESTORE_PARAMETERS = ("self", "checkpoint_state", "step")


def _check_unknown_keys(module: ModuleType) -> None:
  version.check_parameters(module, "_prepare_for_pydantic", ("raw_keys", "config_class"), ("raw_keys", "config_class"))


def _apply_unknown_keys(module: ModuleType, rebinding: rebind.Rebinding) -> None:
  from maxtext_pp_ext.host.replacements import unknown_keys  # pylint: disable=import-outside-toplevel

  host_prepare = module._prepare_for_pydantic

  @functools.wraps(host_prepare)
  def _prepare_for_pydantic(raw_keys, *args, **kwargs):
    bound = inspect.signature(host_prepare).bind(raw_keys, *args, **kwargs)
    bound.apply_defaults()
    fields = bound.arguments["config_class"].model_fields
    return unknown_keys.told(lambda: host_prepare(raw_keys, *args, **kwargs), raw_keys, fields)

  rebinding.module_level(module, "_prepare_for_pydantic", _prepare_for_pydantic)


def _check_linen(module: ModuleType) -> None:
  version.check_signature(module, "create_pipeline", CREATE_PIPELINE)


def _apply_linen(module: ModuleType, rebinding: rebind.Rebinding) -> None:
  from maxtext_pp_ext.host.replacements import factory  # pylint: disable=import-outside-toplevel

  host_linen = module.create_pipeline

  @functools.wraps(host_linen)
  def create_pipeline(config, layers=None, mesh=None, remat_policy=None):
    cls = factory.pipeline_class(config)
    if cls is None:
      return host_linen(config, layers, mesh, remat_policy)
    return factory.linen_class(cls)(config=config, stage_factory=layers, mesh=mesh, remat_policy=remat_policy)

  rebinding.module_level(module, "create_pipeline", create_pipeline)


def _check_window(module: ModuleType) -> None:
  decoder = version.attribute(module, "NNXDecoder")
  version.attribute(decoder, "_create_scanned_layers")
  found = inspect.signature(version.attribute(decoder, "_apply_layers_sequentially")).parameters
  version.check_parameters(decoder, "_apply_layers_sequentially", SCAN_PARAMETERS, (*SCAN_PARAMETERS, *found))


def _apply_window(module: ModuleType, rebinding: rebind.Rebinding) -> None:
  host_scan = module.NNXDecoder._apply_layers_sequentially
  host_scanned = module.NNXDecoder._create_scanned_layers

  @functools.wraps(host_scan)
  def _apply_layers_sequentially(self, layers, x_in, *args, length, **kwargs):
    from maxtext_pp_ext.host.replacements import scanned_layers  # pylint: disable=import-outside-toplevel

    return scanned_layers.apply(host_scan, self, layers, x_in, args, length, kwargs)

  @functools.wraps(host_scanned)
  def _create_scanned_layers(self, *args, **kwargs):
    from maxtext_pp_ext.host.replacements import stage_modules  # pylint: disable=import-outside-toplevel

    return stage_modules.build_scanned(host_scanned, self, *args, **kwargs)

  rebinding.class_level(module.NNXDecoder, "_create_scanned_layers", _create_scanned_layers)
  rebinding.class_level(module.NNXDecoder, "_apply_layers_sequentially", _apply_layers_sequentially)


def _check_sharding(module: ModuleType) -> None:
  version.check_parameters(module, "create_nnx_abstract_model", ABSTRACT_MODEL[:2], ABSTRACT_MODEL)


def _apply_sharding(module: ModuleType, rebinding: rebind.Rebinding) -> None:
  from maxtext_pp_ext.host.replacements import checkpoint_load, sharding_conflicts  # pylint: disable=import-outside-toplevel

  host_create = module.create_nnx_abstract_model

  @functools.wraps(host_create)
  def create_nnx_abstract_model(config, mesh=None, *args, **kwargs):
    create_model, model = host_create(config, mesh, *args, **kwargs)
    sharding_conflicts.judge(config, model, mesh)
    checkpoint_load.refuse_other_layouts_within_from_pretrained(config, model)
    return create_model, model

  rebinding.module_level(module, "create_nnx_abstract_model", create_nnx_abstract_model)


def _check_pretrained(module: ModuleType) -> None:
  _check_sharding(module)
  # We judge what it is about to load at the point where it makes its model.
  version.check_calls(module, "from_pretrained", "create_nnx_abstract_model")


def _apply_pretrained(module: ModuleType, rebinding: rebind.Rebinding) -> None:
  from maxtext_pp_ext.host.replacements import checkpoint_load  # pylint: disable=import-outside-toplevel

  host_load = module.from_pretrained

  @functools.wraps(host_load)
  def from_pretrained(*args, **kwargs):
    with checkpoint_load.from_pretrained():
      return host_load(*args, **kwargs)

  rebinding.module_level(module, "from_pretrained", from_pretrained)


def _check_checkpointing(module: ModuleType) -> None:
  found = inspect.signature(version.attribute(module, "load_state_if_possible")).parameters
  version.check_parameters(module, "load_state_if_possible", LOAD_PARAMETERS, (*LOAD_PARAMETERS, *found))


def _apply_checkpointing(module: ModuleType, rebinding: rebind.Rebinding) -> None:
  from maxtext_pp_ext.host.replacements import checkpoint_load  # pylint: disable=import-outside-toplevel

  host_load = module.load_state_if_possible
  signature = inspect.signature(host_load)

  @functools.wraps(host_load)
  def load_state_if_possible(*args, **kwargs):
    bound = signature.bind_partial(*args, **kwargs)  # a missing argument is MaxText's own error
    bound.apply_defaults()
    checkpoint_load.refuse_other_layouts(**bound.arguments)
    return host_load(*args, **kwargs)

  rebinding.module_level(module, "load_state_if_possible", load_state_if_possible)


def _check_engine(module: ModuleType) -> None:
  manager = version.attribute(module, "CheckpointManager")
  version.check_parameters(manager, "restore_checkpoint", RESTORE_PARAMETERS, RESTORE_PARAMETERS)
  version.attribute(manager, "get_latest_step")


def _apply_engine(module: ModuleType, rebinding: rebind.Rebinding) -> None:
  host_restore = module.CheckpointManager.restore_checkpoint

  @functools.wraps(host_restore)
  def restore_checkpoint(self, checkpoint_state, step=None):
    from maxtext_pp_ext.host.replacements import checkpoint_load  # pylint: disable=import-outside-toplevel

    checkpoint_load.refuse_other_layouts_of_engine(self, checkpoint_state.model, step)
    return host_restore(self, checkpoint_state, step)

  rebinding.class_level(module.CheckpointManager, "restore_checkpoint", restore_checkpoint)


# What a run needs that is refused where a feature is missing.
def _runs_ours(config: Any) -> bool:
  return derived.runs_ours(config)


def _judges(config: Any) -> bool:
  return getattr(config, "sharding_conflicts", "fallback") != "fallback"


def _refuse(feature: str, path: str, needs: Callable[[Any], bool]) -> Callable[[ModuleType, rebind.Rebinding, str], None]:
  """Returns what makes a call of a function raise MissingFeatureError, if its config needs the feature.

  Args:
    feature: its name.
    path: of the function in its module, `name` or `Class.name`.
    needs: whether a config needs the feature.
  """
  owner_name, _, name = path.rpartition(".")

  def refuse(module: ModuleType, rebinding: rebind.Rebinding, why: str) -> None:
    owner: Any = getattr(module, owner_name, None) if owner_name else module
    if not hasattr(owner, name):
      return  # so nothing calls it
    host_function = getattr(owner, name)

    @functools.wraps(host_function)
    def refusing(*args, **kwargs):
      if any(needs(config) for config in _configs([*args, *kwargs.values()])):
        raise version.MissingFeatureError(feature, why)
      return host_function(*args, **kwargs)

    replace = rebinding.class_level if owner_name else rebinding.module_level
    replace(owner, name, refusing)

  return refuse


def _configs(arguments: Iterable[Any]) -> Iterator[Any]:
  """The configs among arguments, and those of models among them."""
  for argument in arguments:
    model = getattr(argument, "model", argument)
    for found in (argument, *(getattr(each, "config", None) for each in (argument, model, getattr(model, "base", None)))):
      if hasattr(found, "pipeline_impl"):
        yield found


def _feature(name: str, check: Callable, apply: Callable, path: str = "", needs: Callable[[Any], bool] = _runs_ours):
  return Feature(name=name, check=check, apply=apply, refuse=_refuse(name, path, needs) if path else None)


# MaxText's own errors take the place of the first and of CHECKPOINTS: it cannot load arrays of other shapes.
UNKNOWN_KEYS = _feature("short errors about mistyped keys", _check_unknown_keys, _apply_unknown_keys)
LINEN = _feature("pipelines in Linen models", _check_linen, _apply_linen, "create_pipeline")
WINDOW = _feature(
    "implementations without a pipeline", _check_window, _apply_window, "NNXDecoder.__call__", derived.windowed
)
SHARDING_CONFLICTS = _feature(
    "the key sharding_conflicts", _check_sharding, _apply_sharding, "create_nnx_abstract_model", _judges
)
PRETRAINED = _feature(
    "the refusal of checkpoints of another layout in fine-tuning", _check_pretrained, _apply_pretrained, "from_pretrained"
)
CHECKPOINTS = _feature("the message about checkpoints of another layout", _check_checkpointing, _apply_checkpointing)
ENGINE_CHECKPOINTS = _feature(
    "the refusal of checkpoints of another layout in MaxText's training engine",
    _check_engine,
    _apply_engine,
    "CheckpointManager.restore_checkpoint",
)

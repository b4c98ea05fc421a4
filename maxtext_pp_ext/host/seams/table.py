# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The seams: for each MaxText module that we change, what it must look like and what is replaced in it.

  maxtext.configs.types        MaxTextConfig and RLConfig gain our keys
  maxtext.configs.pyconfig     an unknown key is told with the key that was meant
  maxtext.layers.pipeline      create_nnx_pipeline and create_pipeline ask our registry first
  maxtext.layers.nnx_decoders  NNXDecoder.__call__ refuses arguments that its pipelined path drops, and the stages
                               of our pipelines are built our way (`stage_modules`), of layers that MaxText has
                               outside of pipelines only (`batch_split`); without a pipeline our implementations run the
                               layers that MaxText scans over (`scanned_layers`)
  maxtext.utils.model_creation_utils
                               create_nnx_abstract_model, with which every set-up starts, judges the model's parameter
                               shardings (`sharding_conflicts`); from_pretrained refuses checkpoints of another layout
  maxtext.common.checkpointing load_state_if_possible refuses checkpoints of another layout

A seam has optional features beside what every run with an implementation of ours needs. Where MaxText looks different
from what a feature expects, the feature is missing, and the rest works. A run that would need it is refused.

With `pipeline_impl=host` and `sharding_conflicts=fallback` each of them calls MaxText's own and does the same. Exception:
checkpoints of another layout are refused.
"""

from collections.abc import Callable
import dataclasses
import functools
import importlib.metadata
import inspect
import sys
from types import ModuleType

from maxtext_pp_ext.config import host_keys
from maxtext_pp_ext.host.seams import rebind, version

CREATE_NNX_PIPELINE = "(config, stage_factory, mesh, remat_policy=None, *, rngs)"
CREATE_PIPELINE = "(config, layers=None, mesh=None, remat_policy=None)"
STAGE_MODULE = "(self, decoder_blocks, rngs)"
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
# Unknown parameters are refused: the pipelined path might drop them, too.
DECODER_PARAMETERS = (
    "self",
    "shared_embedding",
    "decoder_input_tokens",
    "decoder_positions",
    "decoder_segment_ids",
    "deterministic",
    "model_mode",
    "previous_chunk",
    "slot",
    "kv_caches",
    "attention_metadata",
    "deepstack_visual_embeds",
    "multimodal_input",
)
DECODER_PARAMETERS_SINCE_0_2_5 = ("forced_routed_experts", "decoder_input_embeddings")
# Other parameters are refused where they have a value (`scanned_layers`).
SCAN_PARAMETERS = ("self", "layers", "x_in", "args", "length", "kwargs")
# Features.
UNKNOWN_KEYS = "short errors about mistyped keys"
LINEN = "pipelines in Linen models"
WINDOW = "implementations without a pipeline"
_PYCONFIG = "maxtext.configs.pyconfig"
_PYCONFIG_FUNCTIONS = ("initialize", "initialize_pydantic", "_initialize_pydantic", "_prepare_for_pydantic")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Feature:
  """A part of a seam that MaxText may lack.

  Attributes:
    name: what is missing without it, in a few words.
    check: raises HostVersionError unless the module looks as the feature expects; changes nothing.
    apply: makes the replacements.
    refuse: what is done instead, so that nothing goes without the feature silently; None if nothing has to be done.
  """

  name: str
  check: Callable[[ModuleType], None]
  apply: Callable[[ModuleType, rebind.Rebinding], None]
  refuse: Callable[[ModuleType, rebind.Rebinding, str], None] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seam:
  """One module's seam.

  Attributes:
    needed_for: what it is needed for.
    check: raises HostVersionError unless the module looks as expected; changes nothing.
    apply: makes the replacements, everywhere in MaxText where the originals are bound already.
    features: further replacements, each of which may be missing.
  """

  needed_for: str
  check: Callable[[ModuleType], None]
  apply: Callable[[ModuleType, rebind.Rebinding], None]
  features: tuple[Feature, ...] = ()


def official(module: ModuleType) -> bool:
  """Returns whether this MaxText has the seam itself (`patches/`) and finds our entry point: we then change nothing."""
  group = getattr(module, "EXTENSION_GROUP", None)
  if group is None:
    return False
  return any(ep.value.startswith("maxtext_pp_ext.") for ep in importlib.metadata.entry_points(group=group))


def _check_types(module: ModuleType) -> None:
  from maxtext_pp_ext.host.replacements import config_class  # pylint: disable=import-outside-toplevel

  for name, validator in config_class.VALIDATORS.items():
    cls = version.attribute(module, name)
    version.check_signature(cls, validator, "(self)")
    if validator not in cls.__pydantic_decorators__.model_validators:
      raise version.HostVersionError(f"expected {module.__name__}.{name}.{validator} to be a pydantic validator.")
  fields = module.MaxTextConfig.model_fields
  missing = [key for key in host_keys.REQUIRED if key not in fields]
  if missing:
    raise version.HostVersionError(f"expected the config keys {', '.join(missing)} in {module.__name__}.MaxTextConfig.")
  taken = [key for key in config_class.keys.PipelineKeys.model_fields if key in fields]
  if taken:
    raise version.HostVersionError(f"{module.__name__}.MaxTextConfig has the key {', '.join(taken)} of its own.")
  for function in _pyconfig_functions():
    if module.MaxTextConfig not in (function.__defaults__ or ()):
      raise version.HostVersionError(f"expected {_PYCONFIG}.{function.__name__} to have MaxTextConfig as a default.")


def _apply_types(module: ModuleType, rebinding: rebind.Rebinding) -> None:
  from maxtext_pp_ext.host.replacements import config_class  # pylint: disable=import-outside-toplevel

  for name in config_class.VALIDATORS:
    rebinding.module_level(module, name, config_class.extend_config_class(getattr(module, name)))


def _pyconfig_functions() -> list:
  """Returns the functions with MaxTextConfig as a default, if MaxText was imported before us; [] while pyconfig is
  being imported, since it imports types first."""
  pyconfig = sys.modules.get(_PYCONFIG)
  return [getattr(pyconfig, name) for name in _PYCONFIG_FUNCTIONS if hasattr(pyconfig, name)]


def _nothing(module: ModuleType, rebinding: rebind.Rebinding | None = None) -> None:
  """A seam that is features only."""


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


def _check_pipeline(module: ModuleType) -> None:
  version.check_signature(module, "create_nnx_pipeline", CREATE_NNX_PIPELINE)


def _apply_pipeline(module: ModuleType, rebinding: rebind.Rebinding) -> None:
  from maxtext_pp_ext.host.replacements import factory  # pylint: disable=import-outside-toplevel

  host_nnx = module.create_nnx_pipeline

  @functools.wraps(host_nnx)
  def create_nnx_pipeline(config, stage_factory, mesh, remat_policy=None, *, rngs):
    cls = factory.pipeline_class(config)
    if cls is None:
      return host_nnx(config, stage_factory, mesh, remat_policy, rngs=rngs)
    return cls(config=config, stage_factory=stage_factory, mesh=mesh, remat_policy=remat_policy, rngs=rngs)

  rebinding.module_level(module, "create_nnx_pipeline", create_nnx_pipeline)


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


def _refuse_linen(module: ModuleType, rebinding: rebind.Rebinding, why: str) -> None:
  from maxtext_pp_ext.host.replacements import factory  # pylint: disable=import-outside-toplevel

  if not hasattr(module, "create_pipeline"):
    return  # so nothing calls it
  host_linen = module.create_pipeline

  @functools.wraps(host_linen)
  def create_pipeline(config, *args, **kwargs):
    if factory.pipeline_class(config) is not None:
      raise version.MissingFeatureError(LINEN, why)
    return host_linen(config, *args, **kwargs)

  rebinding.module_level(module, "create_pipeline", create_pipeline)


def _check_decoders(module: ModuleType) -> None:
  decoder = version.attribute(module, "NNXDecoder")
  known = (*DECODER_PARAMETERS, *DECODER_PARAMETERS_SINCE_0_2_5)
  version.check_parameters(decoder, "__call__", DECODER_PARAMETERS, known)
  version.check_signature(decoder, "_get_pipeline_stage_module", STAGE_MODULE)
  version.check_signature(decoder, "get_decoder_layers", "(self)")


def _apply_decoders(module: ModuleType, rebinding: rebind.Rebinding) -> None:
  from maxtext_pp_ext.host.replacements import decoder_call  # pylint: disable=import-outside-toplevel

  host_call = module.NNXDecoder.__call__
  host_stage_module = module.NNXDecoder._get_pipeline_stage_module
  host_layers = module.NNXDecoder.get_decoder_layers
  signature = inspect.signature(host_call)

  @functools.wraps(host_call)
  def __call__(self, *args, **kwargs):
    # bind_partial: a missing argument is MaxText's own error.
    decoder_call.refuse_lost_arguments(self.config, signature.bind_partial(self, *args, **kwargs).arguments)
    return host_call(self, *args, **kwargs)

  @functools.wraps(host_stage_module)
  def _get_pipeline_stage_module(self, decoder_blocks, rngs):
    # This imports Flax, which is already imported when a model is built.
    from maxtext_pp_ext.host.replacements import stage_modules  # pylint: disable=import-outside-toplevel

    return stage_modules.build(host_stage_module, self, decoder_blocks, rngs)

  @functools.wraps(host_layers)
  def get_decoder_layers(self):
    from maxtext_pp_ext.host.replacements import stage_modules  # pylint: disable=import-outside-toplevel

    return stage_modules.layer_classes(self.config, host_layers(self))

  rebinding.class_level(module.NNXDecoder, "__call__", __call__)
  rebinding.class_level(module.NNXDecoder, "get_decoder_layers", get_decoder_layers)
  rebinding.class_level(module.NNXDecoder, "_get_pipeline_stage_module", _get_pipeline_stage_module)


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


def _refuse_window(module: ModuleType, rebinding: rebind.Rebinding, why: str) -> None:
  from maxtext_pp_ext.config import derived  # pylint: disable=import-outside-toplevel

  decoder_call = module.NNXDecoder.__call__

  @functools.wraps(decoder_call)
  def __call__(self, *args, **kwargs):
    if derived.windowed(self.config):
      raise version.MissingFeatureError(WINDOW, why)
    return decoder_call(self, *args, **kwargs)

  rebinding.class_level(module.NNXDecoder, "__call__", __call__)


def _check_model_creation(module: ModuleType) -> None:
  version.check_parameters(module, "create_nnx_abstract_model", ABSTRACT_MODEL[:2], ABSTRACT_MODEL)
  # We judge what it is about to load at the point where it makes its model.
  version.check_calls(module, "from_pretrained", "create_nnx_abstract_model")


def _apply_model_creation(module: ModuleType, rebinding: rebind.Rebinding) -> None:
  from maxtext_pp_ext.host.replacements import checkpoint_load, sharding_conflicts  # pylint: disable=import-outside-toplevel

  host_create, host_load = module.create_nnx_abstract_model, module.from_pretrained

  @functools.wraps(host_create)
  def create_nnx_abstract_model(config, mesh=None, *args, **kwargs):
    create_model, model = host_create(config, mesh, *args, **kwargs)
    sharding_conflicts.judge(config, model, mesh)
    checkpoint_load.refuse_other_layouts_within_from_pretrained(config, model)
    return create_model, model

  @functools.wraps(host_load)
  def from_pretrained(*args, **kwargs):
    with checkpoint_load.from_pretrained():
      return host_load(*args, **kwargs)

  rebinding.module_level(module, "create_nnx_abstract_model", create_nnx_abstract_model)
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


SEAMS = {
    "maxtext.configs.types": Seam(
        needed_for="the keys of this package, and the refusal of configs that cannot work",
        check=_check_types,
        apply=_apply_types,
    ),
    "maxtext.configs.pyconfig": Seam(
        needed_for="short errors about mistyped keys",
        check=_nothing,
        apply=_nothing,
        features=(Feature(name=UNKNOWN_KEYS, check=_check_unknown_keys, apply=_apply_unknown_keys),),
    ),
    "maxtext.layers.pipeline": Seam(
        needed_for="pipelines",
        check=_check_pipeline,
        apply=_apply_pipeline,
        features=(Feature(name=LINEN, check=_check_linen, apply=_apply_linen, refuse=_refuse_linen),),
    ),
    "maxtext.layers.nnx_decoders": Seam(
        needed_for="the stages of pipelines, and the refusal of arguments that they would not get",
        check=_check_decoders,
        apply=_apply_decoders,
        features=(Feature(name=WINDOW, check=_check_window, apply=_apply_window, refuse=_refuse_window),),
    ),
    "maxtext.utils.model_creation_utils": Seam(
        needed_for="the key sharding_conflicts, and the refusal of checkpoints of another layout in fine-tuning",
        check=_check_model_creation,
        apply=_apply_model_creation,
    ),
    "maxtext.common.checkpointing": Seam(
        needed_for="the refusal of checkpoints of another layout",
        check=_check_checkpointing,
        apply=_apply_checkpointing,
    ),
}

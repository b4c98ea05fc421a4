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
  maxtext.training_engine.checkpointing
                               CheckpointManager.restore_checkpoint refuses checkpoints of another layout

What every run with an implementation of ours needs is checked and applied by the seam itself: where MaxText looks
different, the import of the module fails. The rest are `features`: where MaxText looks different from what a feature
expects, the feature is missing, and all else works. A run that would need it is refused.

With `pipeline_impl=host` and `sharding_conflicts=fallback` each of them calls MaxText's own and does the same. Exception:
checkpoints of another layout are refused, and those that lack something without MaxText saying what.
"""

import functools
import importlib.metadata
import inspect
import sys
from types import ModuleType

from maxtext_pp_ext.config import host_keys
from maxtext_pp_ext.host.seams import features, rebind, version
from maxtext_pp_ext.host.seams.seam import Seam

CREATE_NNX_PIPELINE = "(config, stage_factory, mesh, remat_policy=None, *, rngs)"
STAGE_MODULE = "(self, decoder_blocks, rngs)"
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
    "forced_routed_experts",
    "decoder_input_embeddings",
)
_PYCONFIG = "maxtext.configs.pyconfig"
_PYCONFIG_FUNCTIONS = ("initialize", "initialize_pydantic", "_initialize_pydantic", "_prepare_for_pydantic")


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
  for function in _pyconfig_functions() if sys.modules.get(module.__name__) is module else ():
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


def _check_decoders(module: ModuleType) -> None:
  decoder = version.attribute(module, "NNXDecoder")
  version.check_parameters(decoder, "__call__", DECODER_PARAMETERS, DECODER_PARAMETERS)
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


SEAMS = {
    "maxtext.configs.types": Seam(
        needed_for="the keys of this package, and the refusal of configs that cannot work",
        check=_check_types,
        apply=_apply_types,
    ),
    "maxtext.configs.pyconfig": Seam(features=(features.UNKNOWN_KEYS,)),
    "maxtext.layers.pipeline": Seam(
        needed_for="pipelines",
        check=_check_pipeline,
        apply=_apply_pipeline,
        features=(features.LINEN,),
    ),
    "maxtext.layers.nnx_decoders": Seam(
        needed_for="the stages of pipelines, and the refusal of arguments that they would not get",
        check=_check_decoders,
        apply=_apply_decoders,
        features=(features.WINDOW,),
    ),
    "maxtext.utils.model_creation_utils": Seam(features=(features.SHARDING_CONFLICTS, features.PRETRAINED)),
    "maxtext.common.checkpointing": Seam(features=(features.CHECKPOINTS,)),
    "maxtext.training_engine.checkpointing": Seam(features=(features.ENGINE_CHECKPOINTS,)),
}

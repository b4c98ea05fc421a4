# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The patch points: for each MaxText module that we change, what it must look like and what is put there.

`install.py` applies them when modules are imported; `Rebinding.replace` says how what is put there is called. What each
run of ours needs is `required`: where MaxText looks different, the import of the module fails. Without another part a run
that would need it is refused. With `pipeline_impl=host` and `sharding_conflicts=fallback` each replacement calls
MaxText's own and does the same. Exceptions are errors of ours about unknown keys and topologies, about bad or useless
values of our keys, and about checkpoints of another layout, or incomplete ones if MaxText would not say what they lack.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
import dataclasses
import importlib.metadata
import inspect
import sys
from types import ModuleType
from typing import Any

from maxtext_pp_ext.config import derived, host_keys
from maxtext_pp_ext.host import extension_groups
from maxtext_pp_ext.host.patch_points import rebind, version
from maxtext_pp_ext.host.replacements import (
    checkpoint_load,
    config_class,
    decoder_call,
    factory,
    logits,
    scanned_layers,
    sharding_conflicts,
    stage_modules,
    unknown_keys,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
  """Replacements that are made together or not at all."""

  name: str  # what they are needed for
  checks: tuple[version.Check, ...]  # of the module, before anything is replaced
  replaced: Mapping[str, Callable]  # path in the module -> what replaces it, see `Rebinding.replace`
  refused_in: str = ""  # path of the function that refuses runs which need it; "" if MaxText's own error will do
  needs: Callable[[Any], bool] = derived.runs_ours  # whether a config needs it
  required: bool = False  # else a MaxText without it is accepted

  def check(self, module: ModuleType) -> None:
    for each in self.checks:
      each(module)

  def apply(self, module: ModuleType, rebinding: rebind.Rebinding) -> None:
    for path, new in self.replaced.items():
      rebinding.replace(module, path, new)

  def refuse(self, module: ModuleType, rebinding: rebind.Rebinding, why: str) -> None:
    """Makes a call of `refused_in` raise MissingFeatureError if its config needs the part."""

    def refusing(own: Callable, *args: Any, **kwargs: Any) -> Any:
      if any(map(self.needs, _configs([*args, *kwargs.values()]))):
        raise version.MissingFeatureError(self.name, why)
      return own(*args, **kwargs)

    owner, _, name = self.refused_in.rpartition(".")
    if hasattr(getattr(module, owner, None) if owner else module, name):  # else nothing calls it
      rebinding.replace(module, self.refused_in, refusing)


def purpose(parts: Iterable[Part]) -> str:
  """What a patch point is needed for, in words."""
  return next((part.name for part in parts if part.required), ", ".join(part.name for part in parts))


def _configs(arguments: Iterable[Any]) -> Iterator[Any]:
  """The configs among arguments, and those of models among them."""
  for argument in arguments:
    model = getattr(argument, "model", argument)
    for found in (argument, *(getattr(each, "config", None) for each in (argument, model, getattr(model, "base", None)))):
      if hasattr(found, "pipeline_impl"):
        yield found


# Unknown parameters are refused: the pipelined path might drop them, too.
DECODER_PARAMETERS = (
    *("self", "shared_embedding", "decoder_input_tokens", "decoder_positions", "decoder_segment_ids", "deterministic"),
    *("model_mode", "previous_chunk", "slot", "kv_caches", "attention_metadata", "deepstack_visual_embeds"),
    *("multimodal_input", "forced_routed_experts", "decoder_input_embeddings"),
)
# Other parameters are refused where they have a value (`scanned_layers`).
_SCAN_PARAMETERS = ("self", "layers", "x_in", "args", "length", "kwargs")
# The arguments of loading a checkpoint that we read.
_LOAD_PARAMETERS = inspect.getfullargspec(checkpoint_load.refuse_other_layouts).kwonlyargs
_RESTORE_PARAMETERS = ("self", "checkpoint_state", "step")
_ABSTRACT_MODEL = ("config", "mesh", "devices", "model_mode", "rng_key", "quant_mode_str")
_PREPARE_PARAMETERS = ("raw_keys", "config_class")
_PYCONFIG = "maxtext.configs.pyconfig"
# Those with MaxTextConfig as a default.
_PYCONFIG_FUNCTIONS = ("initialize", "initialize_pydantic", "_initialize_pydantic", "_prepare_for_pydantic")


def official(module: ModuleType) -> bool:
  """Whether this MaxText has the patch point itself (`patches/`) and finds our entry points: then we change nothing.

  Raises HostVersionError if a part of the module's patch is missing. Then neither MaxText nor we would do all of it, or
  both. Modules of patches that are not applied are changed by us.
  """
  named = {group for name, group in vars(module).items() if name.endswith("EXTENSION_GROUP")}
  all_of_it = extension_groups.GROUPS.get(module.__name__, set())
  found = {group for group in named & all_of_it if any(map(_is_ours, importlib.metadata.entry_points(group=group)))}
  if found and (missing := all_of_it - found):
    raise version.HostVersionError(
        f"{module.__name__} calls our entry points of {', '.join(sorted(found))}, but not of"
        f" {', '.join(sorted(missing))}. Apply each patch of patches/ whole or not at all, and install this package anew."
    )
  return bool(found)


def _is_ours(point: importlib.metadata.EntryPoint) -> bool:
  return point.value.startswith("maxtext_pp_ext.")


def _check_types(module: ModuleType) -> None:
  for name, validator in config_class.VALIDATORS.items():
    version.signature(f"{name}.{validator}", "(self)")(module)
    if validator not in getattr(module, name).__pydantic_decorators__.model_validators:
      raise version.HostVersionError(f"expected {module.__name__}.{name}.{validator} to be a pydantic validator.")
  fields = module.MaxTextConfig.model_fields
  if missing := [key for key in host_keys.REQUIRED if key not in fields]:
    raise version.HostVersionError(f"expected the config keys {', '.join(missing)} in {module.__name__}.MaxTextConfig.")
  if taken := [key for key in config_class.keys.PipelineKeys.model_fields if key in fields]:
    raise version.HostVersionError(f"{module.__name__}.MaxTextConfig has the key {', '.join(taken)} of its own.")
  # There are such functions if MaxText was imported before us. While pyconfig is imported it has none, since it imports
  # types first.
  pyconfig = sys.modules.get(_PYCONFIG) if sys.modules.get(module.__name__) is module else None
  for name in _PYCONFIG_FUNCTIONS:
    if hasattr(pyconfig, name) and module.MaxTextConfig not in (getattr(pyconfig, name).__defaults__ or ()):
      raise version.HostVersionError(f"expected {_PYCONFIG}.{name} to have MaxTextConfig as a default.")


# Without this part or CHECKPOINTS no run is refused. MaxText has errors about unknown keys, and arrays of other shapes.
UNKNOWN_KEYS = Part(
    name="short errors about mistyped keys",
    checks=(version.parameters("_prepare_for_pydantic", _PREPARE_PARAMETERS, _PREPARE_PARAMETERS),),
    replaced={"_prepare_for_pydantic": unknown_keys.prepare},
)
LINEN = Part(
    name="pipelines in Linen models",
    checks=(version.signature("create_pipeline", "(config, layers=None, mesh=None, remat_policy=None)"),),
    replaced={"create_pipeline": factory.create_pipeline},
    refused_in="create_pipeline",
)
# Without it no run is refused: XLA adds up the stages' gradients.
LOGITS = Part(
    name="logits over slices whose weight's gradient is added up beside backward",
    checks=(
        version.signature(
            "NNXDecoder.apply_output_head", "(self, shared_embedding, y, deterministic, model_mode, normalize_y=True)"
        ),
        version.parameters("NNXDecoder.__call__", DECODER_PARAMETERS, DECODER_PARAMETERS),
    ),
    replaced={"NNXDecoder.apply_output_head": logits.apply_output_head, "NNXDecoder.__call__": logits.call},
)
WINDOW = Part(
    name="implementations without a pipeline",
    checks=(
        version.there("NNXDecoder._create_scanned_layers"),
        version.parameters("NNXDecoder._apply_layers_sequentially", _SCAN_PARAMETERS),
    ),
    replaced={
        "NNXDecoder._create_scanned_layers": stage_modules.build_scanned,
        "NNXDecoder._apply_layers_sequentially": scanned_layers.apply,
    },
    refused_in="NNXDecoder.__call__",
    needs=derived.windowed,
)
SHARDING_CONFLICTS = Part(
    name="the key sharding_conflicts",
    checks=(version.parameters("create_nnx_abstract_model", _ABSTRACT_MODEL[:2], _ABSTRACT_MODEL),),
    replaced={"create_nnx_abstract_model": sharding_conflicts.create_nnx_abstract_model},
    refused_in="create_nnx_abstract_model",
    needs=lambda config: getattr(config, "sharding_conflicts", "fallback") != "fallback",
)
PRETRAINED = Part(
    name="the refusal of checkpoints of another layout in fine-tuning",
    # What it is about to load is judged at the point where it makes its model.
    checks=(*SHARDING_CONFLICTS.checks, version.calls("from_pretrained", "create_nnx_abstract_model")),
    replaced={"from_pretrained": checkpoint_load.from_pretrained},
    refused_in="from_pretrained",
)
CHECKPOINTS = Part(
    name="the message about checkpoints of another layout",
    checks=(version.parameters("load_state_if_possible", _LOAD_PARAMETERS),),
    replaced={"load_state_if_possible": checkpoint_load.load_state_if_possible},
)
ENGINE_CHECKPOINTS = Part(
    name="the refusal of checkpoints of another layout in MaxText's training engine",
    checks=(
        version.parameters("CheckpointManager.restore_checkpoint", _RESTORE_PARAMETERS, _RESTORE_PARAMETERS),
        version.there("CheckpointManager.get_latest_step"),
    ),
    replaced={"CheckpointManager.restore_checkpoint": checkpoint_load.restore_checkpoint},
    refused_in="CheckpointManager.restore_checkpoint",
)
_TYPES = Part(
    name="the keys of this package, and the refusal of configs that cannot work",
    checks=(_check_types,),
    replaced=dict.fromkeys(config_class.VALIDATORS, config_class.extend_config_class),
    required=True,
)
_PIPELINE = Part(
    name="pipelines",
    checks=(version.signature("create_nnx_pipeline", "(config, stage_factory, mesh, remat_policy=None, *, rngs)"),),
    replaced={"create_nnx_pipeline": factory.create_nnx_pipeline},
    required=True,
)
_DECODERS = Part(
    name="the stages of pipelines, and the refusal of arguments that they would not get",
    checks=(
        version.parameters("NNXDecoder.__call__", DECODER_PARAMETERS, DECODER_PARAMETERS),
        version.signature("NNXDecoder._get_pipeline_stage_module", "(self, decoder_blocks, rngs)"),
        version.signature("NNXDecoder.get_decoder_layers", "(self)"),
    ),
    replaced={
        "NNXDecoder.__call__": decoder_call.call,
        "NNXDecoder.get_decoder_layers": stage_modules.get_decoder_layers,
        "NNXDecoder._get_pipeline_stage_module": stage_modules.build,
    },
    required=True,
)
# Module -> the parts that are made in it, in this order.
PATCH_POINTS: dict[str, tuple[Part, ...]] = {
    "maxtext.configs.types": (_TYPES,),
    "maxtext.configs.pyconfig": (UNKNOWN_KEYS,),
    "maxtext.layers.pipeline": (_PIPELINE, LINEN),
    "maxtext.layers.nnx_decoders": (_DECODERS, WINDOW, LOGITS),
    "maxtext.utils.model_creation_utils": (SHARDING_CONFLICTS, PRETRAINED),
    "maxtext.common.checkpointing": (CHECKPOINTS,),
    "maxtext.training_engine.checkpointing": (ENGINE_CHECKPOINTS,),
}

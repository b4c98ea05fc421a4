# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Targets of our wheel's entry points, for a MaxText that has the seams itself (`patches/`).

maxtext.config_class    extend_config_class(cls) -> cls
maxtext.pipeline_class  pipeline_class(config) -> NNX module class or None
maxtext.decoder_call    check_decoder_call(config, **arguments) -> None
maxtext.decoder_layers  decoder_layers(config, layer_classes) -> layer_classes
maxtext.pipeline_stage  build_pipeline_stage(build, decoder, layer_classes, rngs) -> NNX module
maxtext.abstract_model  check_abstract_model(config, model, mesh) -> None
maxtext.checkpoint_load  check_checkpoint_load(**arguments) -> None
maxtext.pretrained_load  check_pretrained_load(config, model) -> None
"""

from collections.abc import Callable
from typing import Any

from maxtext_pp_ext.config import derived
from maxtext_pp_ext.config.host_keys import HostKeys
from maxtext_pp_ext.config.keys import DerivedKeys
from maxtext_pp_ext.errors import UnsupportedError
from maxtext_pp_ext.host.replacements import config_class, decoder_call, factory, sharding_conflicts

extend_config_class = config_class.extend_config_class
pipeline_class = factory.pipeline_class
check_abstract_model = sharding_conflicts.judge


def decoder_layers(config: HostKeys, layer_classes: list[type]) -> list[type]:
  """Returns the classes of a decoder's layers, given MaxText's own."""
  from maxtext_pp_ext.host.replacements import stage_modules  # pylint: disable=import-outside-toplevel

  return stage_modules.layer_classes(config, layer_classes)


def build_pipeline_stage(build: Callable, decoder: Any, layer_classes: list[type], rngs: Any) -> Any:
  """Builds the module of one stage with MaxText's own `build(decoder, layer_classes, rngs)`."""
  from maxtext_pp_ext.host.replacements import stage_modules  # pylint: disable=import-outside-toplevel

  return stage_modules.build(build, decoder, layer_classes, rngs)


def check_checkpoint_load(**arguments: Any) -> None:
  """Raises ValueError if the checkpoint has another layout, or lacks something.

  Args:
    **arguments: those of load_state_if_possible.
  """
  from maxtext_pp_ext.host.replacements import checkpoint_load  # pylint: disable=import-outside-toplevel

  checkpoint_load.refuse_other_layouts(**arguments)


def check_pretrained_load(config: DerivedKeys, model: Any) -> None:
  """Raises ValueError if what from_pretrained is about to load has another layout than the model, or lacks weights."""
  from maxtext_pp_ext.host.replacements import checkpoint_load  # pylint: disable=import-outside-toplevel

  checkpoint_load.refuse_other_layouts_of_pretrained(config, model)


def check_decoder_call(config: HostKeys, **arguments: Any) -> None:
  """Raises NotImplementedError if the pipelined path would drop an argument that matters, or there is no pipeline.

  These seams have none for layers without a pipeline, which would silently run as MaxText runs them.
  """
  if derived.windowed(config):
    raise UnsupportedError(
        f"pipeline_impl={derived.pipeline_impl(config)} without a pipeline: this MaxText is patched with seams that have "
        "pipelines only. Install MaxText without patches/, or set pipeline_impl=host."
    )
  decoder_call.refuse_lost_arguments(config, arguments)

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Builds a pipeline's stages for automatic sharding, in a model with explicit sharding as well.

Read in MaxText 0.2.4 and 0.2.5: layers decide by `config.shard_mode` and the mesh they are built with whether they name
the layout of each result. Our pipelines run them under automatic sharding.
"""

import types
from typing import Any

from maxtext_pp_ext import registry
from maxtext_pp_ext.config_view import ConfigView
from maxtext_pp_ext.host import factory


class _DecoderView:
  """A decoder that builds its layers with another config and mesh. The decoder itself must not change meanwhile."""

  def __init__(self, decoder: Any, config: Any, mesh: Any):
    self._decoder, self.config, self.mesh = decoder, config, mesh

  def __getattr__(self, name: str) -> Any:
    method = getattr(type(self._decoder), name, None)
    if isinstance(method, types.FunctionType):
      return types.MethodType(method, self)
    return getattr(self._decoder, name)


def for_automatic_sharding(decoder: Any) -> Any:
  """What is to build the stages of a decoder: itself or, if it is explicitly sharded and its pipeline ours, a view."""
  config = decoder.config
  if factory.pipeline_impl(config) == registry.HOST or config.shard_mode.value != "explicit":
    return decoder
  from maxtext_pp_ext.sharding import automatic  # pylint: disable=import-outside-toplevel

  auto = ConfigView(config, (("shard_mode", type(config.shard_mode)("auto")),))
  return _DecoderView(decoder, auto, automatic(decoder.mesh))

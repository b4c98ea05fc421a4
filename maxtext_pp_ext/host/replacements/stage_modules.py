# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Builds the stages of our pipelines for the decoder.

- `config.shard_mode` and the mesh decide whether a layer names the layout of each result. Our pipelines run layers under
  automatic sharding, also in a model with explicit sharding.
- MaxText no longer reads `set_remat_policy_on_layers_per_stage`. Here it means what it meant in MaxText's Linen decoder:
  the remat policy applies to each layer of a stage, or to each block of a cycle of layers (`cycles`).
"""

from collections.abc import Callable
import dataclasses
import functools
import types
from typing import Any

from flax import nnx

from maxtext_pp_ext import registry
from maxtext_pp_ext.config.derived import pipeline_impl, windowed
from maxtext_pp_ext.config.host_keys import HostKeys
from maxtext_pp_ext.config.view import with_values
from maxtext_pp_ext.host.models import abstract_model, cycles
from maxtext_pp_ext.host.replacements import batch_split
from maxtext_pp_ext.sharding import automatic


class _DecoderView:
  """A decoder that builds its layers with another config and mesh. The decoder itself stays unchanged."""

  def __init__(self, decoder: Any, config: Any, mesh: Any):
    self._decoder, self.config, self.mesh = decoder, config, mesh

  def __getattr__(self, name: str) -> Any:
    method = getattr(type(self._decoder), name, None)
    return types.MethodType(method, self) if isinstance(method, types.FunctionType) else getattr(self._decoder, name)


def layer_classes(config: HostKeys, classes: list[type]) -> list[type]:
  """Returns the classes of a decoder's layers, in the pipeline and outside, in place of MaxText's own."""
  if pipeline_impl(config) == registry.HOST or not config.use_batch_split_schedule:
    return classes
  return [*classes[:-1], batch_split.batch_split(classes[-1])]  # DeepSeek's: dense, MoE


def get_decoder_layers(own: Callable, decoder: Any) -> list[type]:
  """`NNXDecoder.get_decoder_layers`."""
  return layer_classes(decoder.config, own(decoder))


def build(own: Callable, decoder: Any, layer_classes: list[type], rngs: nnx.Rngs) -> nnx.Module:
  """`NNXDecoder._get_pipeline_stage_module`: returns the module of one stage."""
  config = decoder.config
  if pipeline_impl(config) == registry.HOST:
    return own(decoder, layer_classes, rngs)
  layer_classes = [cycles.block_class(config, layer_class) for layer_class in layer_classes]
  if config.set_remat_policy_on_layers_per_stage and config.remat_policy != "none":
    policy = _RematPolicy(config, decoder.get_remat_policy())
    layer_classes = [rematerialised(layer_class, policy) for layer_class in layer_classes]
  decoder = _automatic(decoder)
  if (cycle := cycles.length(config)) > 1:
    blocks = {"num_layers_per_pipeline_stage": config.num_layers_per_pipeline_stage // cycle}
    decoder = _DecoderView(decoder, with_values(decoder.config, blocks), decoder.mesh)
  in_turn = decoder.config.num_layers_per_pipeline_stage > 1 and not config.scan_layers_per_stage
  if abstract_model.only_shapes.get() and in_turn:
    layer_classes = [_copying(layer_class) for layer_class in layer_classes]  # type: ignore[misc]  # called, not asked
  return _without_mesh(own(decoder, layer_classes, rngs))


def _copying(layer_class: type) -> Callable[..., nnx.Module]:
  """Returns a function that makes a layer, and then copies it, which is quicker: others differ in drawn values only."""
  made: list[nnx.Module] = []

  def make(**kwargs: Any) -> nnx.Module:
    if made:
      return nnx.clone(made[0])
    made.append(layer_class(**kwargs))
    return made[0]

  return make


def build_scanned(own: Callable, decoder: Any, *args: Any, **kwargs: Any) -> nnx.Module:
  """`NNXDecoder._create_scanned_layers`; for automatic sharding if an implementation of ours runs the layers."""
  if pipeline_impl(decoder.config) == registry.HOST:
    return own(decoder, *args, **kwargs)
  trains = windowed(decoder.config) and decoder.model_mode == "train"
  return _without_mesh(own(_automatic(decoder) if trains else decoder, *args, **kwargs))


def _without_mesh[Layers: nnx.Module | None](layers: Layers) -> Layers:
  """The layers, with no mesh noted in their variables, as `simple` and `simple_mlp` layers do.

  When a model is made without arrays, Flax (0.12.12) shards each variable with a mesh, and takes a logical name that has
  no rule for a mesh axis. MaxText (0.2.5) has no rules for `layers_per_stage` and `layers_outside_pipeline`, so set-up
  would fail. Variables without a mesh are sharded by MaxText's own function, which replicates along such names.
  """
  for _, variable in nnx.iter_graph(layers):
    if isinstance(variable, nnx.Variable) and variable.has_metadata("mesh"):
      variable.del_metadata("mesh")
  return layers


def _automatic(decoder: Any) -> Any:
  """A decoder that builds layers for automatic sharding, if its implementation wants that; else the decoder."""
  config = decoder.config
  contract = registry.get(pipeline_impl(config)).contract
  if config.shard_mode.value != "explicit" or not contract.shards_automatically:
    return decoder
  automatically = with_values(config, {"shard_mode": type(config.shard_mode)("auto")})
  return _DecoderView(decoder, automatically, automatic(decoder.mesh))


@dataclasses.dataclass(frozen=True)
class _RematPolicy:
  """A config and its remat policy. Equal for equal configs, although MaxText creates a new policy each time."""

  config: Any
  policy: Any = dataclasses.field(compare=False)


@functools.cache
def rematerialised(layer_class: type, remat: _RematPolicy) -> type:
  """A layer class that keeps what the policy says, and recomputes the rest. One per config, so that models are equal."""

  # Graph-mode, since layers sow values and count random numbers.
  @functools.partial(nnx.remat, policy=remat.policy, static_argnums=(4, 5), graph=True, graph_updates=True)
  def call(self, inputs, segment_ids, positions, deterministic, model_mode):
    return layer_class.__call__(self, inputs, segment_ids, positions, deterministic, model_mode)

  return cycles.subclass(layer_class, __call__=call)

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Builds the layers of MaxText's decoder, with a pipeline around them and without, and nothing else of the model.

The decoder itself makes both: its stage builder fills the pipeline, and its path without a pipeline makes the layers that
a pipeline must equal.
"""

from collections.abc import Iterator
import dataclasses
import math
import re
from typing import Any, NamedTuple

from flax import linen as nn
from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from maxtext.layers import nnx_decoders, quantizations
import numpy as np

from maxtext_pp_ext import registry
from maxtext_pp_ext.config.derived import is_deepseek, sound_layers
from maxtext_pp_ext.config.host_keys import HostKeys
from maxtext_pp_ext.config.view import with_values


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layer:
  """A decoder layer: a module of its own, or taken out of a stack."""

  module: nnx.Module
  path: tuple[str, ...] = ()  # leads to it, or to its stack
  index: int | None = None  # its place in the stack


class Structure(NamedTuple):
  """The structure of a layer without its arrays."""

  graphdef: nnx.GraphDef
  paths: frozenset[tuple[str, ...]]  # of its state


def paths(state: nnx.State) -> frozenset[tuple[str, ...]]:
  return frozenset(tuple(map(str, path)) for path, _ in nnx.to_flat_state(state))


def pipeline(
    config: Any, mesh: Mesh, implementation: str | type, layer_class: type | None = None, *, seed: int = 0
) -> nnx.Module:
  """The decoder's pipeline module with random weights: biases are not zero, and scales differ.

  `implementation` is a value of `pipeline_impl`, used instead of the config's, or a class; `layer_class` that of the
  layers, by default of `decoder_block`; `seed` that of weights and dropout. Raises registry.UnknownImplementationError if
  there is no implementation of that name.
  """
  new: Any = implementation
  if isinstance(implementation, str):
    is_host = implementation == registry.HOST
    new = nnx_decoders.create_nnx_pipeline if is_host else registry.get(implementation).contract.module_class
    config = with_values(config, {"pipeline_impl": implementation})
  found = []

  @jax.jit  # without it, each of many small operations would be compiled separately
  def build():
    decoder = _WithoutLayers(config, mesh, quantizations.configure_quantization(config), rngs=nnx.Rngs(seed))
    classes = decoder.get_decoder_layers() if layer_class is None else [layer_class] * 2
    # A function, as MaxText passes one: `nnx.vmap` takes no bound method.
    stage = lambda rngs: decoder._get_pipeline_stage_module(classes, rngs)  # pylint: disable=protected-access
    rngs = nnx.Rngs(params=seed, dropout=seed + 1)
    module = new(config=config, stage_factory=stage, mesh=mesh, remat_policy=decoder.get_remat_policy(), rngs=rngs)
    graphdef, *(params, rest) = nnx.split(module, nnx.Param, ...)
    found.append((graphdef, jax.eval_shape(lambda: params)))
    return rest  # so that initializers are not even compiled

  with jax.set_mesh(mesh), nn.logical_axis_rules(config.logical_axis_rules):
    rest = build()
  [(graphdef, params)] = found
  return nnx.merge(graphdef, _random(params, seed), rest)


def _random(params: nnx.State, seed: int) -> nnx.State:
  """Random values whose size keeps activations near 1."""
  generator = np.random.default_rng(seed)

  def one(path, weight):
    values = generator.standard_normal(weight.shape) / math.sqrt(max(weight.shape))
    return jnp.asarray(values + (1.0 if "scale" in jax.tree_util.keystr(path) else 0.0), weight.dtype)

  return jax.tree_util.tree_map_with_path(one, params)


class _WithoutLayers(nnx_decoders.NNXDecoder):
  """A decoder that can build stages and has built no layers."""

  def _init_decoder_layers(self, decoder_block_classes, rngs, mesh):
    del decoder_block_classes, rngs, mesh


def without_pipeline(config: Any, mesh: Mesh, layer_class: type | None = None) -> list[Structure]:
  """The structure of each pipelined layer in the model without a pipeline; `layer_class` as in `pipeline`."""
  plain = with_values(config, {"using_pipeline_parallelism": False})
  quant = quantizations.configure_quantization(plain)
  found: list[Structure] = []

  def build():
    rngs = nnx.Rngs(params=0, dropout=1)
    if layer_class is None:
      layers = [layer.module for layer in _of_decoder(nnx_decoders.NNXDecoder(plain, mesh, quant, rngs=rngs))]
    else:
      layers = [layer_class(config=plain, mesh=mesh, quant=quant, model_mode="train", rngs=rngs)]
      layers *= sound_layers(config)
    for graphdef, state in map(nnx.split, layers):
      structure = Structure(graphdef, paths(state))
      found.append(next((known for known in found if known == structure), structure))

  with jax.set_mesh(mesh), nn.logical_axis_rules(config.logical_axis_rules):
    jax.eval_shape(build)
  # Layers outside the pipeline: DeepSeek's dense layers and remaining MoE layers run first; others run last.
  return found[-sound_layers(config) :] if is_deepseek(config) else found[: sound_layers(config)]


def _of_decoder(decoder: nnx_decoders.NNXDecoder) -> Iterator[Layer]:
  for module in decoder.get_layers():
    is_stack = decoder.config.scan_layers and getattr(decoder, "layers_remainder", None) is not module
    yield from _of_stack(module, decoder.config) if is_stack else layers_of(module)


def layers_of(module: nnx.Module) -> Iterator[Layer]:
  """Yields the decoder layers of a stage or a block, in the order they run in.

  Layers outside stacks are the module's own objects, so changes of their state persist.
  """
  if not holds_layers(module):
    yield Layer(module=module)
    return
  for name, is_stack in children(module):
    child = getattr(module, name)
    if is_stack:
      yield from _of_stack(child, module.config, (name,))  # type: ignore[attr-defined]  # what holds layers has it
    else:
      yield from (dataclasses.replace(layer, path=(name, *layer.path)) for layer in layers_of(child))


def holds_layers(module: nnx.Module) -> bool:
  """Whether the module is a stage or a block of layers, instead of a layer."""
  stages = (nnx_decoders.NNXScannedPipelineStage, nnx_decoders.NNXSequentialPipelineStage)
  return isinstance(module, stages) or type(module).__name__.endswith("ScannableBlock")


def children(module: nnx.Module) -> list[tuple[str, bool]]:
  """(name, whether it is a stack) of what holds a stage's or block's layers, in the order they run in."""
  if isinstance(module, nnx_decoders.NNXScannedPipelineStage):
    return [("scanned_layers", True)]
  numbered = [name for name in vars(module) if re.fullmatch(r"layers?_\d+", name)]
  numbered.sort(key=lambda name: int(name.split("_")[1]))
  names = ("local_layers", *numbered, "global_layer")
  return [(name, name == "local_layers") for name in names if getattr(module, name, None) is not None]


def _of_stack(stack: nnx.Module, config: HostKeys, path: tuple[str, ...] = ()) -> Iterator[Layer]:
  """Yields the layers of a module that stacks parameters along `param_scan_axis`, other state along the first axis."""
  graphdef, *(params, rest) = nnx.split(stack, nnx.Param, ...)
  axis = config.param_scan_axis
  for index in range(jax.tree.leaves(params)[0].shape[axis]):
    at = jax.tree.map(lambda w, index=index: jnp.take(w, index, axis=min(axis, w.ndim - 1)), params)
    module = nnx.merge(graphdef, at, jax.tree.map(lambda x, index=index: x[index], rest))
    for layer in layers_of(module):
      yield dataclasses.replace(layer, path=(*path, *layer.path), index=index)

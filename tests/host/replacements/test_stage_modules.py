# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""What the decoder builds a stage of: layers with the remat policy on each, and layers for automatic sharding."""

from flax import linen as nn
from flax import nnx
import jax
from maxtext.models.llama2 import LlamaDecoderLayer
import optax
import pytest

from maxtext_pp_ext.host.models import decoder_layers
from maxtext_pp_ext.host.replacements import stage_modules
from maxtext_pp_ext.pipelines.circular import CircularBswPipeline
from maxtext_pp_ext.sharding import logical_axes
from maxtext_pp_ext.testing import parity
from tests.marks import slow_but
from tests.parity.blocks import DELTA_NET
from tests.parity.common import LAYERS, make_config, make_pipeline

TWO_LAYERS = {"stages": 2, "repeats": 2, "microbatches": 4, "layers_per_stage": 2}


def rematerialised(config, policy=None):
  return stage_modules.rematerialised(LlamaDecoderLayer, stage_modules._RematPolicy(config, policy))


@pytest.mark.parametrize(
    "scanned, of_iterations",
    slow_but([(True, True)], [(False, False), (False, True), (True, False), (True, True)], spread=True),
)
def test_layers_with_remat_have_the_gradients_of_layers_without(monkeypatch, scanned, of_iterations):
  keys = {"scan_layers_per_stage": scanned, "set_remat_policy_on_pipeline_iterations": of_iterations}
  config = make_config(**TWO_LAYERS, **keys)
  mesh = parity.mesh_of(config)
  monkeypatch.setitem(LAYERS, "with remat", rematerialised(config))
  pipeline = make_pipeline(CircularBswPipeline, config, "with remat", mesh)
  batch = parity.Batch.random(config)
  reference = parity.reference(pipeline, LlamaDecoderLayer, config, batch)
  parity.compare(pipeline, reference, batch, mesh, config.logical_axis_rules).check(parity.tolerance(config))


def residuals(config, mesh, layer_class):
  """How many bytes a layer keeps for backward, without its parameters."""
  layer = layer_class(config=config, mesh=mesh, quant=None, model_mode="train", rngs=nnx.Rngs(params=0, dropout=1))
  graphdef, params, rest = nnx.split(layer, nnx.Param, ...)
  batch = parity.Batch.random(config)
  call = lambda x: nnx.merge(graphdef, params, rest, copy=True)(x, batch.segment_ids, batch.positions, True, "train")[0]
  with jax.set_mesh(mesh), nn.logical_axis_rules(config.logical_axis_rules):
    kept = jax.eval_shape(lambda x: jax.vjp(call, x)[1], batch.inputs)
  return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(kept))


def test_layers_with_remat_keep_their_inputs_only():
  config = make_config(**TWO_LAYERS)
  mesh = parity.mesh_of(config)
  assert residuals(config, mesh, rematerialised(config)) < 0.5 * residuals(config, mesh, LlamaDecoderLayer)


def test_models_of_one_config_have_layers_of_one_class():
  config = make_config(**TWO_LAYERS)
  policies = [jax.checkpoint_policies.save_only_these_names("x") for _ in range(2)]
  assert rematerialised(config, policies[0]) is rematerialised(config, policies[1])
  assert rematerialised(config) is not rematerialised(make_config(**TWO_LAYERS))


def test_layers_for_explicit_sharding_are_refused_in_a_pipeline():
  config = make_config(stages=2, repeats=1, microbatches=2, shard_mode="explicit")
  with pytest.raises(NotImplementedError, match="Build them with a config that has shard_mode=auto"):
    make_pipeline(CircularBswPipeline, config, "llama", parity.mesh_of(config))


def test_moments_have_the_logical_axes_of_their_parameters_where_a_block_scans_over_layers_itself():
  keys = DELTA_NET | {"inhomogeneous_layer_cycle_interval": 2, "layers_per_stage": 2}
  config = make_config(stages=2, repeats=1, microbatches=2, decoder_block="qwen3_next", **keys)
  pipeline = decoder_layers.pipeline(config, parity.mesh_of(config), "circular_bsw")
  optimizer = nnx.Optimizer(pipeline, optax.adam(1.0), wrt=nnx.Param)
  params = {path: logical_axes(variable) for path, variable in nnx.to_flat_state(nnx.state(pipeline, nnx.Param))}
  moments = [(path, v) for path, v in nnx.to_flat_state(nnx.state(optimizer)) if {"mu", "nu"} & set(path)]
  assert len(moments) == 2 * len(params)
  for path, variable in moments:
    of = next(parameter for parameter in params if path[-len(parameter) :] == parameter)
    assert logical_axes(variable) == params[of], path

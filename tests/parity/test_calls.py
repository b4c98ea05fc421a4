# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""A pipeline called twice before its loss holds the values and has the gradients of layers without a pipeline."""

import functools

from flax import nnx
import jax
import jax.numpy as jnp
import pytest

from maxtext_pp_ext.host.models import decoder_layers
from maxtext_pp_ext.testing import parity
from tests.parity.common import make_config

ONE_LAYER = {"stages": 2, "repeats": 2, "microbatches": 2}
IN_A_SCAN = {"stages": 2, "repeats": 1, "microbatches": 2, "layers_per_stage": 2, "scan_layers_per_stage": True}


class Sows(nnx.Module):
  """Sows one loss, and assigns another."""

  def __init__(self, config, mesh, model_mode, quant=None, *, rngs):
    del mesh, model_mode, quant
    init = nnx.initializers.lecun_normal()
    self.weight = nnx.Param(init(rngs.params(), (config.emb_dim, config.emb_dim)), sharding_names=("embed", "mlp"))

  def leave(self, outputs):
    self.sow(nnx.Intermediate, "activation_mean", outputs.mean())
    self.sow(nnx.Intermediate, "activation_stdev", outputs.std())
    self.moe_lb_loss = nnx.Intermediate(jnp.square(outputs).mean())

  def __call__(self, inputs, segment_ids, positions, deterministic, model_mode):
    outputs = inputs + jnp.tanh(jnp.dot(inputs, self.weight[...], precision="highest"))
    self.leave(outputs)
    return outputs, None


class Adds(Sows):

  def leave(self, outputs):
    self.sow(nnx.Intermediate, "total", outputs.mean(), reduce_fn=lambda a, b: a + b, init_fn=lambda: 0.0)


class KeepsLast(Sows):

  def leave(self, outputs):
    self.sow(nnx.Intermediate, "activation_mean", outputs.mean(), reduce_fn=lambda _, last: (last,))


def without_pipeline(structure, axis, params, batches):
  """Outputs and sown values of layers called one after another, twice; leaves [layer, …]."""
  weight = jnp.moveaxis(params["weight"][...], axis, -3)
  layers = [
      nnx.merge(structure.graphdef, nnx.State({"weight": nnx.Param(each)}))
      for each in weight.reshape(-1, *weight.shape[-2:])
  ]
  call = lambda x, layer: layer(x, None, None, True, "train")[0]
  outputs = [functools.reduce(call, layers, x) for x in batches]
  states = [nnx.to_pure_dict(nnx.pop(layer, nnx.Intermediate)) for layer in layers]
  return outputs, jax.tree.map(lambda *values: jnp.stack(values), *states)


def in_pipeline(graphdef, rest, names, params, batches):
  """Like `without_pipeline`, of a pipeline: [repeat, stage, layer of a stage, …]; `names` lead to the layers."""
  layers = functools.reduce(lambda inner, name: {name: inner}, reversed(("layers", *names)), params)
  module = nnx.merge(graphdef, nnx.State(layers), rest, copy=True)
  outputs = [module(x, None, None, True, "train") for x in batches]
  return outputs, functools.reduce(
      lambda of, name: of[name], names, nnx.to_pure_dict(nnx.pop(module.layers, nnx.Intermediate))
  )


def with_gradients(fn, batches):
  """Outputs and sown values, and gradients of a loss of all of them."""

  def loss(params):
    outputs, sown = fn(params, batches)
    values = [jnp.ravel(value) for value in jax.tree.leaves(sown)]
    of_sown = sum(jnp.vdot(jnp.cos(jnp.arange(v.size) + i), v) for i, v in enumerate(values))
    return of_sown + sum(jnp.mean(x * batches[0]) for x in outputs), (outputs, values)

  return jax.jit(jax.value_and_grad(loss, has_aux=True))


def both(layer_class, sizes):
  """The config, the mesh, a pipeline and layers without one as functions, parameters, and two batches."""
  config = make_config(**sizes)
  mesh = parity.mesh_of(config)
  pipeline = decoder_layers.pipeline(config, mesh, "circular_bsw", layer_class)
  graphdef, params, rest = nnx.split(pipeline, nnx.Param, ...)
  names, axis = (("scanned_layers",), config.param_scan_axis + 1) if config.scan_layers_per_stage else ((), -3)
  params = functools.reduce(lambda of, name: of[name], ("layers", *names), params)
  inputs = parity.Batch.random(config).inputs
  [structure, *_] = decoder_layers.without_pipeline(config, mesh, layer_class)
  plain = functools.partial(without_pipeline, structure, axis)
  return config, mesh, functools.partial(in_pipeline, graphdef, rest, names), plain, params, [inputs, 2.0 * inputs[::-1]]


@pytest.mark.parametrize(
    "layer_class, sizes, values",
    [
        (Sows, ONE_LAYER, 5),
        pytest.param(KeepsLast, ONE_LAYER, 1, marks=pytest.mark.slow),
        pytest.param(Sows, IN_A_SCAN, 5, marks=pytest.mark.slow),
    ],
    ids=["sown and assigned", "the last one kept", "sown in a scan"],
)
def test_what_two_calls_leave_is_what_layers_without_a_pipeline_hold(layer_class, sizes, values):
  config, mesh, pipelined, plain, params, batches = both(layer_class, sizes)
  with jax.set_mesh(mesh):
    (_, found), gradient = with_gradients(pipelined, batches)(params)
  (_, expected), expected_gradient = with_gradients(plain, batches)(params)
  assert len(found[1]) == values
  pairs = zip(jax.tree.leaves((found, gradient)), jax.tree.leaves((expected, expected_gradient)), strict=True)
  assert max(parity.relative_error(a, b) for a, b in pairs) < parity.tolerance(config)


def test_what_a_layer_makes_of_both_calls_otherwise_is_refused_by_its_name():
  _, mesh, pipelined, _, params, batches = both(Adds, ONE_LAYER)
  with jax.set_mesh(mesh):
    jax.eval_shape(lambda p: pipelined(p, batches[:1]), params)
    with pytest.raises(NotImplementedError, match=r"holds total of an earlier call.*nnx.pop"):
      jax.eval_shape(lambda p: pipelined(p, batches), params)

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Dropout in a pipeline: the masks of a layer and microbatch are its own, and the same forward and backward."""

from flax import linen as nn
from flax import nnx
import jax
import jax.numpy as jnp
from maxtext.layers import linears
import numpy as np
import pytest

from maxtext_pp_ext.host import decoder_layers
from maxtext_pp_ext.testing import parity
from tests.parity.common import make_config

SIZES = {"stages": 3, "repeats": 2, "microbatches": 6}
DROPOUT = {"dropout_rate": 0.3, "enable_dropout": True}


class Masks(nnx.Module):
  """Multiplies by 1 where it drops and by 3 where it does not, and sows which."""

  def __init__(self, config, mesh, model_mode, quant=None, *, rngs):
    del mesh, model_mode, quant
    self.weight = nnx.Param(jnp.ones(config.emb_dim), sharding_names=("embed",))
    self.dropout = linears.Dropout(rate=0.5, rngs=rngs)

  def __call__(self, inputs, segment_ids, positions, deterministic, model_mode):
    mask = self.dropout(jnp.ones_like(inputs), deterministic=deterministic)
    self.sow(nnx.Intermediate, "mask", mask)
    return inputs * (1 + mask) + 0.0 * self.weight[...]


def run(implementation, *, deterministic):
  """Masks [layer, microbatch, row, sequence, embed], outputs by inputs, gradients by cotangents, both in that form."""
  config = make_config(**SIZES)
  mesh, batch = parity.mesh_of(config), parity.Batch.random(config)
  pipeline = decoder_layers.pipeline(config, mesh, implementation, Masks)
  function, params = parity.function_of(pipeline, deterministic=deterministic)

  @jax.jit
  def step(x, cotangent):
    call = lambda x: function(params, x, batch.segment_ids, batch.positions)
    outputs, vjp_fn, sown = jax.vjp(call, x, has_aux=True)
    return outputs, vjp_fn(cotangent)[0], sown

  with jax.set_mesh(mesh), nn.logical_axis_rules(config.logical_axis_rules):
    outputs, gradient, sown = step(batch.inputs, batch.cotangent)
  [masks] = sown.values()
  masks = np.asarray(masks).reshape(-1, *masks.shape[2:])
  in_microbatches = lambda x: np.asarray(x).reshape(masks.shape[1:])
  return masks, in_microbatches(outputs / batch.inputs), in_microbatches(gradient / batch.cotangent)


@pytest.mark.parametrize(
    "implementation",
    ["circular_bsw", *(pytest.param(name, marks=pytest.mark.slow) for name in ("circular", "circular_ag_once"))],
)
def test_masks_are_the_same_in_forward_and_backward_and_different_for_layers_and_microbatches(implementation):
  masks, forward, backward = run(implementation, deterministic=False)
  assert masks.shape[:2] == (6, 6) and set(np.unique(masks)) == {0.0, 2.0}
  factors = np.prod(1 + masks, axis=0)
  np.testing.assert_allclose(forward, factors, rtol=1e-5)
  np.testing.assert_allclose(backward, factors, rtol=1e-5)
  assert len(np.unique(masks.reshape(36, -1), axis=0)) == 36


def test_another_call_drops_something_else():
  """A step leaves its random counters to the next."""
  config = make_config(**SIZES)
  mesh, batch = parity.mesh_of(config), parity.Batch.random(config)
  graphdef, state = nnx.split(decoder_layers.pipeline(config, mesh, "circular_bsw", Masks))

  @jax.jit
  def step(state):
    module = nnx.merge(graphdef, state)
    module(batch.inputs, batch.segment_ids, batch.positions, False, "train")
    [masks] = jax.tree.leaves(nnx.pop(module, nnx.Intermediate))
    return nnx.state(module), masks

  found = []
  with jax.set_mesh(mesh), nn.logical_axis_rules(config.logical_axis_rules):
    for _ in range(2):
      state, masks = step(state)
      found += list(np.asarray(masks).reshape(36, -1))
  assert len(np.unique(found, axis=0)) == 72


def test_without_dropout_nothing_is_dropped():
  masks, forward, backward = run("circular_bsw", deterministic=True)
  assert (masks == 1).all()
  np.testing.assert_allclose(forward, 2.0**6, rtol=1e-5)
  np.testing.assert_allclose(backward, 2.0**6, rtol=1e-5)


# Several layers of a stage may share a random stream.
KEYS = {
    "llama2": {"decoder_block": "llama2"},
    "llama2, two layers per stage": {"decoder_block": "llama2", "layers_per_stage": 2, "repeats": 1},
    "llama2, layers per stage in a scan": {
        "decoder_block": "llama2",
        "layers_per_stage": 2,
        "repeats": 1,
        "scan_layers_per_stage": True,
    },
    "gpt3": {"decoder_block": "gpt3", "mlp_activations": ["gelu"], "fused_qkv": True},
}


@pytest.mark.parametrize(
    "keys",
    [pytest.param(keys, id=name, marks=() if name == "llama2" else pytest.mark.slow) for name, keys in KEYS.items()],
)
def test_layers_of_maxtext_learn_with_dropout_as_with_the_same_keys_in_a_loop(keys):
  config = make_config(**{**SIZES, **DROPOUT, **keys})
  parity.assert_pipeline_parity(None, config, deterministic=False)

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Dropout in a pipeline or a window: the masks of a layer and microbatch are its own, the same forward and backward.

MaxText's trainers draw with `unsafe_rbg`, everything else with JAX's default, threefry.
"""

import contextlib
import functools

from flax import linen as nn
from flax import nnx
import jax
import jax.numpy as jnp
from maxtext.layers import linears
from maxtext.utils import maxtext_utils
import numpy as np
import pytest

from maxtext_pp_ext import registry
from maxtext_pp_ext.host.models import decoder_layers
from maxtext_pp_ext.testing import parity
from tests.parity import windows
from tests.parity.common import make_config, put_on_slices
from tests.trainer.cases import OTHERS

SIZES = (("stages", 3), ("repeats", 2), ("microbatches", 6))
# Idle stages pass microbatches on, and stages work on them in another order.
ON_SLICES = (*SIZES, ("dcn_pipeline_parallelism", 3))
# As few microbatches as stages: the first stage's bubbles follow its last microbatches.
TIGHT = (("stages", 4), ("repeats", 3), ("microbatches", 4))
# No pipeline. Microbatches of so few rows that each is a part of the batch.
WINDOW = (("stages", 1), ("repeats", 3), ("microbatches", 4), ("microbatch_size", 2), ("param_scan_axis", 0))
PRNGS = ("unsafe_rbg", "threefry2x32")
DROPOUT = {"dropout_rate": 0.1, "enable_dropout": True}


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


class Window(nnx.Module):
  """Stacked layers that run without a pipeline, called like a pipeline."""

  def __init__(self, config, mesh, implementation):
    rngs = nnx.Rngs(params=0, dropout=1).fork(split=config.num_pipeline_repeats)
    self.layers = nnx.vmap(lambda rngs: Masks(config, mesh, "train", rngs=rngs))(rngs)
    self.config, self.mesh, self.pipeline_class = config, mesh, registry.get(implementation).load()

  def __call__(self, inputs, segment_ids, positions, deterministic, model_mode):
    return self.pipeline_class.run_scanned(
        self.layers,
        inputs,
        segment_ids,
        positions,
        config=self.config,
        mesh=self.mesh,
        length=self.config.num_pipeline_repeats,
        call=lambda layer, *args: layer(*args, deterministic, model_mode),
        policy=None,
        recomputes=True,
    )


def build(config, mesh, implementation):
  if config.using_pipeline_parallelism:
    return decoder_layers.pipeline(config, mesh, implementation, Masks)
  return Window(config, mesh, implementation)


@contextlib.contextmanager
def drawing(prng, mesh, config):
  with jax.default_prng_impl(prng), jax.set_mesh(mesh), nn.logical_axis_rules(config.logical_axis_rules):
    yield


@functools.cache
def run(implementation, *, deterministic, prng, sizes=SIZES, devices=None):
  """Masks [layer, microbatch, row, sequence, embed], outputs by inputs, gradients by cotangents, both in that form; and
  the program."""
  sizes = dict(sizes)
  with pytest.MonkeyPatch.context() as patch:
    if sizes.pop("dcn_pipeline_parallelism", 1) > 1:
      put_on_slices(patch)
    return _run(implementation, deterministic, prng, make_config(**sizes), devices)


def _run(implementation, deterministic, prng, config, devices):
  mesh = maxtext_utils.get_mesh_from_config(config, jax.devices()[:devices]) if devices else parity.mesh_of(config)
  batch = parity.Batch.random(config)
  with drawing(prng, mesh, config):
    pipeline = build(config, mesh, implementation)
    function, params = parity.function_of(pipeline, deterministic=deterministic)

    @jax.jit
    def step(x, cotangent):
      call = lambda x: function(params, x, batch.segment_ids, batch.positions)
      outputs, vjp_fn, sown = jax.vjp(call, x, has_aux=True)
      return outputs, vjp_fn(cotangent)[0], sown

    lowered = step.lower(batch.inputs, batch.cotangent)
    outputs, gradient, sown = lowered.compile()(batch.inputs, batch.cotangent)
  [masks] = sown.values()
  masks = np.asarray(masks).reshape(-1, config.num_pipeline_microbatches, *masks.shape[-3:])
  in_microbatches = lambda x: np.asarray(x).reshape(masks.shape[1:])
  return masks, in_microbatches(outputs / batch.inputs), in_microbatches(gradient / batch.cotangent), lowered.as_text()


def slow(*values):
  return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ["prng", "implementation", "sizes"],
    [
        ("unsafe_rbg", "circular_bsw", TIGHT),
        pytest.param("unsafe_rbg", "circular_bsw", ON_SLICES, id="unsafe_rbg-circular_bsw-on slices"),
        slow("unsafe_rbg", "circular_bsw", SIZES),
        ("unsafe_rbg", "circular_bsw", WINDOW),
        *(slow("unsafe_rbg", name, WINDOW) for name in OTHERS),
        slow("threefry2x32", "circular_bsw", TIGHT),
        slow("unsafe_rbg", "circular_bsw", (*SIZES, ("pipeline_delay_activation_forwarding", True))),
        *(slow(prng, name, SIZES) for prng in PRNGS for name in OTHERS),
    ],
)
def test_masks_are_the_same_in_forward_and_backward_and_different_for_layers_and_microbatches(
    prng, implementation, sizes
):
  masks, forward, backward, program = run(implementation, deterministic=False, prng=prng, sizes=sizes)
  (_, stages), (_, repeats), (_, microbatches) = sizes[:3]
  assert masks.shape[:2] == (stages * repeats, microbatches) and set(np.unique(masks)) == {0.0, 2.0}
  factors = np.prod(1 + masks, axis=0)
  np.testing.assert_allclose(forward, factors, rtol=1e-5)
  np.testing.assert_allclose(backward, factors, rtol=1e-5)
  each = masks.reshape(stages * repeats * microbatches, -1)
  assert len(np.unique(each, axis=0)) == len(each)
  # What this operation draws depends on its layout on a TPU, and backward's may differ from forward's.
  assert "rng_bit_generator" not in program


@pytest.mark.parametrize(
    ["prng", "sizes"], [("unsafe_rbg", TIGHT), slow("unsafe_rbg", WINDOW), slow("threefry2x32", TIGHT)]
)
def test_masks_do_not_depend_on_the_mesh(prng, sizes):
  one, other = (run("circular_bsw", deterministic=False, prng=prng, sizes=sizes, devices=n)[0] for n in (None, 4))
  np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ["prng", "sizes"],
    [
        ("unsafe_rbg", {"stages": 2, "repeats": 2, "microbatches": 2}),
        ("unsafe_rbg", {"stages": 1, "repeats": 4, "microbatches": 2, "param_scan_axis": 0}),
        slow("threefry2x32", {"stages": 2, "repeats": 2, "microbatches": 2}),
    ],
    ids=["unsafe_rbg", "unsafe_rbg, window", "threefry2x32"],
)
def test_another_call_drops_something_else(prng, sizes):
  """A call leaves its random counters to the next, in the same step and in another."""
  config = make_config(**sizes)
  mesh, batch = parity.mesh_of(config), parity.Batch.random(config)

  @jax.jit
  def step(state):
    module = nnx.merge(graphdef, state)
    for _ in range(2):
      module(batch.inputs, batch.segment_ids, batch.positions, False, "train")
    masks = jax.tree.leaves(nnx.pop(module, nnx.Intermediate))
    return nnx.state(module), masks

  found = []
  with drawing(prng, mesh, config):
    graphdef, state = nnx.split(build(config, mesh, "circular_bsw"))
    for _ in range(2):
      state, masks = step(state)
      found += [mask for of_call in masks for mask in np.asarray(of_call).reshape(8, -1)]
  assert len(np.unique(found, axis=0)) == len(found) == 32


def test_without_dropout_nothing_is_dropped():
  masks, forward, backward, _ = run("circular_bsw", deterministic=True, prng="unsafe_rbg")
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
QUICK = ("unsafe_rbg", "llama2")


@pytest.mark.parametrize(
    ["prng", "keys"],
    [
        pytest.param(prng, keys, id=f"{name}, {prng}", marks=() if (prng, name) == QUICK else pytest.mark.slow)
        for name, keys in KEYS.items()
        for prng in PRNGS
    ],
)
def test_layers_of_maxtext_learn_with_dropout_as_with_the_same_keys_in_a_loop(prng, keys):
  config = make_config(**{**dict(SIZES), **DROPOUT, **keys})
  with jax.default_prng_impl(prng):
    parity.assert_pipeline_parity(None, config, deterministic=False)


@pytest.mark.slow
@pytest.mark.parametrize("block", ["llama2", "gpt3"])
def test_a_window_drops_with_the_keys_of_the_layers_what_the_scan_drops(monkeypatch, block):
  windows.with_own_keys(monkeypatch)
  keys = {"decoder_block": block, **(KEYS["gpt3"] if block == "gpt3" else {}), **DROPOUT}
  windows.compare(["circular_bsw"], num_pipeline_microbatches=-1, **keys)

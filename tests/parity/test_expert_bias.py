# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Balancing experts by routers' biases: MaxText's train step gives a pipelined model the biases it gives a plain one.

Both models start from the same weights and see the same batches; the plain one sees each batch as a whole. Biases move by
multiples of the rate, so they are equal to the bit or wrong, as long as no token's choice of experts hangs on rounding.
"""

import functools

from flax import linen as nn
from flax import nnx, traverse_util
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from maxtext.common.train_state_nnx import TrainStateNNX
from maxtext.configs import pyconfig
from maxtext.layers.moe import MoEBiasVar
from maxtext.trainers.pre_train import train
from maxtext.utils import maxtext_utils, model_creation_utils, sharding
import numpy as np
import optax
import pytest

from maxtext_pp_ext.checkpoint.moves import converted
from maxtext_pp_ext.host.models import layouts
from maxtext_pp_ext.testing import parity
from tests.marks import slow_but
from tests.parity.common import BASE_YML, make_config, TINY

STEPS, RATE, BOUND = 3, 0.01, 1e-5
TRAINED = nnx.Any(nnx.Param, MoEBiasVar)
DEEPSEEK = {
    "model_name": "deepseek3-tiny",
    "override_model_config": True,
    "base_moe_mlp_dim": 16,
    "base_num_query_heads": 2,
    "base_num_kv_heads": 2,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "first_num_dense_layers": 1,
    "routed_bias_update_rate": RATE,
    "megablox": False,
    "sparse_matmul": False,
}
# Of the model and the trainer: the same with and without a pipeline.
MODEL_KEYS = (
    "sparse_matmul",
    "gradient_accumulation_steps",
    "param_scan_axis",
    "load_balance_loss_weight",
    "mtp_num_layers",
    "routed_bias_update_rate",
)


def make(stages, repeats, layers_per_stage=1, outside=0, **overrides):
  """A pipelined config with this number of MoE layers outside the pipeline; a plain one of the same model and batch."""
  inside = stages * repeats * layers_per_stage
  layers = {"base_num_decoder_layers": DEEPSEEK["first_num_dense_layers"] + outside + inside}
  model = DEEPSEEK | layers | {key: overrides.pop(key) for key in MODEL_KEYS if key in overrides}
  initialize = lambda **keys: pyconfig.initialize(["", BASE_YML], **(TINY | model | keys))
  if stages == 1:  # a window over the same scan
    rows = {"per_device_batch_size": 8 / jax.device_count()}
    return initialize(pipeline_impl="circular_bsw", **rows, **overrides), initialize(**rows)
  pipelined = make_config(
      stages=stages,
      repeats=repeats,
      layers_per_stage=layers_per_stage,
      pipeline_parallel_layers=inside,
      **({"microbatches": stages, "microbatch_size": 4} | model | overrides),
  )
  rows = pipelined.micro_batch_size_to_train_on / jax.device_count()
  return pipelined, initialize(per_device_batch_size=rows)


def without_pipeline(state, pipelined, plain):
  """A pipelined model's state in the layout of a plain model, by path."""
  arrays = traverse_util.flatten_dict(nnx.to_pure_dict(state))
  return converted(arrays, layouts.of_config(pipelined), layouts.of_config(plain))


def create(config, mesh):
  """(graph, state) of MaxText's train state, with SGD."""

  new_model = model_creation_utils.create_nnx_abstract_model(config, mesh)[0]

  def new():
    model = new_model()
    return TrainStateNNX(model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param))

  with nn.logical_axis_rules(config.logical_axis_rules):
    graph, abstract = nnx.split(nnx.eval_shape(new))
    shardings = sharding.nnx_construct_named_sharding(abstract, mesh)
    return graph, jax.jit(lambda: nnx.state(new()), out_shardings=shardings)()


def steps(config, mesh, graph, state, batches):
  """(parameters and biases after MaxText's train steps, losses)."""
  losses = []
  with jax.set_mesh(mesh), nn.logical_axis_rules(config.logical_axis_rules):
    params_shardings = jax.tree.map(
        lambda x: NamedSharding(mesh, P()), nnx.state(nnx.merge(graph, state).model, nnx.Param)
    )
    step = jax.jit(functools.partial(train.train_step, graph, config, None, params_shardings))
    for batch in batches:
      state, metrics = step(state, batch)
      losses.append(float(metrics["scalar"]["learning/loss"]))
  return state["model"], losses


def random_batches(config):
  rows, length = config.global_batch_size_to_train_on, config.max_target_length
  for key in jax.random.split(jax.random.key(1), STEPS):
    tokens = jax.random.randint(key, (rows, length + 1), 0, config.vocab_size)
    segments, positions = jnp.ones((rows, length), jnp.int32), jnp.tile(jnp.arange(length), (rows, 1))
    yield {
        "inputs": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "inputs_position": positions,
        "targets_position": positions,
        "inputs_segmentation": segments,
        "targets_segmentation": segments,
    }


def check(**overrides):
  pipelined, plain = make(**overrides)
  mesh = parity.mesh_of(pipelined)
  batches = list(random_batches(pipelined))
  graph, state = create(pipelined, mesh)
  plain_mesh = Mesh(maxtext_utils.create_device_mesh(plain, jax.devices()), plain.mesh_axes)
  plain_graph, plain_state = create(plain, plain_mesh)
  start = without_pipeline(nnx.filter_state(state["model"], TRAINED), pipelined, plain)
  nnx.replace_by_pure_dict(plain_state["model"], traverse_util.unflatten_dict(start))

  found, losses = steps(pipelined, mesh, graph, state, batches)
  expected, expected_losses = steps(plain, plain_mesh, plain_graph, plain_state, batches)
  found = without_pipeline(nnx.filter_state(found, TRAINED), pipelined, plain)
  expected = traverse_util.flatten_dict(nnx.to_pure_dict(nnx.filter_state(expected, TRAINED)))
  rate = pipelined.routed_bias_update_rate
  biases = [path for path in found if path[-2:] == ("gate", "bias")]
  assert len(biases) == 1 + pipelined.mtp_num_layers
  for bias in biases:
    moved = np.asarray(found[bias]) - start[bias]
    assert np.abs(moved).max() > 0.5 * rate if rate else not moved.any()
    np.testing.assert_array_equal(found[bias], expected[bias])
  assert all(losses)
  np.testing.assert_allclose(losses, expected_losses, rtol=BOUND)
  # Biases aside, a step moves every parameter.
  assert not [path for path in expected if path not in biases and np.array_equal(expected[path], start[path])]
  errors = {path: parity.relative_error(found[path], expected[path]) for path in expected}
  assert max(errors.values()) < BOUND, errors
  return moved


@pytest.mark.parametrize("stages, repeats", slow_but([], [(2, 1), (3, 2), (4, 2)], spread=True))
def test_biases_move_as_without_a_pipeline(stages, repeats):
  check(stages=stages, repeats=repeats, microbatches=2 * stages)


ALL_LOSSES = {"load_balance_loss_weight": 0.1, "mtp_num_layers": 1}
WINDOWS = {"alone": {}, "all losses, gradient accumulation": {**ALL_LOSSES, "gradient_accumulation_steps": 2}}


@pytest.mark.parametrize("keys", slow_but([], WINDOWS))
@pytest.mark.parametrize("microbatches", slow_but([], [-1, 2]))
def test_biases_move_in_a_window_as_in_the_scan(microbatches, keys):
  check(stages=1, repeats=2, num_pipeline_microbatches=microbatches, **keys)


# name: keys of a pipeline with 2 stages.
OPTIONS = {
    "gradient accumulation": {"gradient_accumulation_steps": 2},
    "load-balance loss and gradient accumulation": {"load_balance_loss_weight": 0.1, "gradient_accumulation_steps": 2},
    "multi-token prediction": ALL_LOSSES,
    "multi-token prediction and gradient accumulation": {**ALL_LOSSES, "gradient_accumulation_steps": 2},
    "several layers per stage": {"layers_per_stage": 2, "scan_layers_per_stage": True},
    "experts on several devices": {"ici_expert_parallelism": 4},
    "weights and batch on several devices": {"ici_fsdp_parallelism": 2, "ici_data_parallelism": 2},
    "sparse experts": {"sparse_matmul": True, "ici_fsdp_parallelism": 4},
    "sparse experts and gradient accumulation": {"sparse_matmul": True, "gradient_accumulation_steps": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("keys", OPTIONS.values(), ids=OPTIONS.keys())
def test_biases_move_as_without_a_pipeline_under_every_option(keys):
  check(stages=2, repeats=2, **keys)

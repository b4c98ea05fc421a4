# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Blocks whose layers differ by index in cycles: MaxText's train step learns the same with a pipeline as without."""

import functools

from flax import nnx, traverse_util
import jax
from jax.sharding import Mesh
from maxtext.configs import pyconfig
from maxtext.utils import maxtext_utils
import numpy as np
import pytest

from maxtext_pp_ext.host.models import cycles
from maxtext_pp_ext.testing import parity
from tests.parity.blocks import PIPELINED
from tests.parity.common import BASE_YML, TINY
from tests.parity.test_expert_bias import create, random_batches, steps, without_pipeline

CYCLIC = [case for case in PIPELINED if case.cycle > 1]


@pytest.mark.slow
@pytest.mark.parametrize("block", ["gpt_oss", "gemma3", "llama4"])
def test_a_model_of_whole_cycles_learns_as_without_a_pipeline(block):
  [case] = [case for case in CYCLIC if case.block == block]
  pipelined = case.config(stages=3, repeats=1, microbatches=3, load_balance_loss_weight=0.0)
  rows = pipelined.micro_batch_size_to_train_on / jax.device_count()
  keys = TINY | case.keys | {"decoder_block": block, "load_balance_loss_weight": 0.0, "per_device_batch_size": rows}
  plain = pyconfig.initialize(["", BASE_YML], **keys, base_num_decoder_layers=pipelined.num_decoder_layers)
  mesh = parity.mesh_of(pipelined)
  plain_mesh = Mesh(maxtext_utils.create_device_mesh(plain, jax.devices()[:1]), plain.mesh_axes)
  graph, state = create(pipelined, mesh)
  plain_graph, plain_state = create(plain, plain_mesh)
  start = without_pipeline(nnx.filter_state(state["model"], nnx.Param), pipelined, plain)
  nnx.replace_by_pure_dict(plain_state["model"], traverse_util.unflatten_dict(start))

  batches = list(random_batches(pipelined))
  found, losses = steps(pipelined, mesh, graph, state, batches)
  expected, expected_losses = steps(plain, plain_mesh, plain_graph, plain_state, batches)
  bound = parity.tolerance(pipelined)
  np.testing.assert_allclose(losses, expected_losses, rtol=bound)
  found = without_pipeline(nnx.filter_state(found, nnx.Param), pipelined, plain)
  expected = traverse_util.flatten_dict(nnx.to_pure_dict(nnx.filter_state(expected, nnx.Param)))
  assert found.keys() == expected.keys()
  errors = {path: parity.relative_error(found[path], expected[path]) for path in expected}
  assert max(errors.values()) < bound, errors
  moved = [path for path in expected if not np.array_equal(found[path], start[path])]
  assert len(moved) > 0.9 * len(expected)


def test_a_block_of_a_cycle_is_told_what_the_path_without_a_pipeline_tells_it():
  from maxtext.models import envy, gemma3, llama4

  for block, cls, arguments in (
      ("gemma3", gemma3.Gemma3ScannableBlock, {"num_of_layers": 6}),
      ("llama4", llama4.Llama4ScannableBlock, {"nope_layer_interval": 4, "interleave_moe_layer_step": 2}),
      ("envy", envy.EnvyScannableBlock, {"interleave_moe_layer_step": 2}),
  ):
    [case] = [case for case in CYCLIC if case.block == block]
    config = case.config(stages=2, repeats=1, microbatches=2)
    made = cycles.block_class(config, cls)
    assert issubclass(made, cls) and made is cycles.block_class(config, cls)
    assert cycles.length(config) == case.cycle
    mesh = parity.mesh_of(config)
    build = functools.partial(made, config=config, mesh=mesh, model_mode="train")
    module = nnx.eval_shape(build, rngs=nnx.Rngs(0))
    assert {key: getattr(module, key) for key in arguments} == arguments

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""In a bubble a stage computes on a microbatch, so that experts get as many tokens as in an iteration of work.

On zeros all tokens choose the same experts. The devices that hold them would compute on all tokens of the bubble, and all
stages would wait for them.
"""

from flax import linen as nn
from flax import nnx
import jax
import jax.numpy as jnp
from maxtext.layers.moe import RoutedMoE
from maxtext.models.mixtral import MixtralDecoderLayer
import numpy as np
import pytest

from maxtext_pp_ext.pipelines.circular import CircularBswPipeline
from maxtext_pp_ext.pipelines.stages import StageModule
from maxtext_pp_ext.testing import parity
from tests.marks import slow_but
from tests.parity.common import LAYERS, make_config, make_pipeline

EXPERTS, CHOSEN = 8, 2
MESHES = {
    "stage 4, expert 2": {"stages": 4, "ici_expert_parallelism": 2},
    "stage 2, expert 4": {"stages": 2, "ici_expert_parallelism": 4},
    "stage 3, expert 2": {"stages": 3, "ici_expert_parallelism": 2},
}


@pytest.fixture(autouse=True)
def counting(monkeypatch):
  """Layers of Mixtral whose router reports the number of tokens that it sends to each expert."""
  choose = RoutedMoE.get_topk

  def get_topk(self, *args, **keys):
    weights, experts = choose(self, *args, **keys)
    self.sow(nnx.Intermediate, "tokens", jnp.bincount(experts.ravel(), length=self.num_experts))
    return weights, experts

  monkeypatch.setattr(RoutedMoE, "get_topk", get_topk)
  monkeypatch.setitem(LAYERS, "mixtral", MixtralDecoderLayer)


def run(repeats, delay, **keys):
  """(schedule, tokens [T, S, expert], inputs of stages that backward computes from [T, S, …])."""
  config = make_config(
      repeats=repeats,
      microbatches=delay * keys["stages"],
      pipeline_delay_activation_forwarding=delay == 2,
      microbatch_size=8,
      max_target_length=64,
      decoder_block="mixtral",
      num_experts=EXPERTS,
      num_experts_per_tok=CHOSEN,
      base_moe_mlp_dim=32,
      capacity_factor=-1.0,
      megablox=False,
      sparse_matmul=False,
      **keys,
  )
  mesh = parity.mesh_of(config)
  pipeline = make_pipeline(CircularBswPipeline, config, "mixtral", mesh)
  execution = pipeline.execution(deterministic=True, model_mode="train")
  stage = StageModule.of(pipeline.layers, execution.schedule, execution.stacking, execution.call)
  batch = parity.Batch.random(config)
  split = lambda x: x.reshape(config.num_pipeline_microbatches, -1, *x.shape[1:])
  aux, inputs = stage.aux(split(batch.segment_ids), split(batch.positions)), split(batch.inputs)

  def both(weights, x):
    engine = execution._engine(stage, aux, x)
    forward = lambda weights, x: engine(weights, aux, x)
    _, pull_back, sown = jax.vjp(forward, weights, x, has_aux=True)
    return sown, jax.tree.leaves(pull_back)

  with jax.set_mesh(mesh), nn.logical_axis_rules(config.logical_axis_rules):
    sown, residuals = jax.jit(both)(stage.weights, inputs)
  found = [x for path, x in jax.tree_util.tree_leaves_with_path(sown) if "tokens" in jax.tree_util.keystr(path)]
  schedule = execution.schedule
  shape = (schedule.iterations, schedule.stages, *inputs.shape[1:])
  kept = [np.asarray(x) for x in residuals if x.shape == shape]
  assert len(found) == 1 and len(kept) == 1
  return schedule, np.asarray(found[0]).reshape(schedule.iterations, schedule.stages, EXPERTS), kept[0]


def iterations(schedule):
  """(t, s, the iteration of the last item of stage s) of bubbles before and after the work, and (t, s) of the work."""
  last = lambda s: schedule.iteration(schedule.repeats - 1, schedule.microbatches - 1, s)
  before, after, work = [], [], []
  for t in range(schedule.iterations):
    for s in range(schedule.stages):
      if not schedule.is_bubble(t, s):
        work.append((t, s))
      else:
        (before if t < schedule.iteration(0, 0, s) else after).append((t, s, last(s)))
  assert len(before) == len(after) == schedule.delay * schedule.stages * (schedule.stages - 1) // 2
  return before, after, work


@pytest.mark.parametrize("repeats, delay", slow_but([(2, 1)], [(1, 1), (2, 1), (2, 2)], spread=True))
@pytest.mark.parametrize("keys", slow_but(["stage 4, expert 2"], MESHES))
def test_devices_get_as_many_tokens_in_a_bubble_as_of_a_microbatch(keys, repeats, delay):
  schedule, tokens, inputs = run(repeats, delay, **keys)
  before, after, work = iterations(schedule)
  by_device = tokens.reshape(*tokens.shape[:2], keys["ici_expert_parallelism"], -1).sum(-1).max(-1)
  most = max(by_device[at] for at in work)
  assert {by_device[t, s] <= 1.1 * most for t, s, _ in before} == {True}
  for t, s, last in after:
    # The last item again, in backward, too: what is kept for backward is what it computes from.
    np.testing.assert_array_equal(tokens[t, s], tokens[last, s])
    np.testing.assert_array_equal(inputs[t, s], inputs[last, s])
  for t, s, _ in before:
    assert np.ptp(inputs[t, s], axis=(0, 1)).min() > 0, "no two tokens alike"

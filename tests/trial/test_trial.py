# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The trial draws what a seed says, and notices a pipeline that trains something else."""

import math

import jax
from maxtext.layers import linears
import numpy as np
import pytest

from maxtext_pp_ext.checkpoint.layout import Layout
from tests.trial import compare, judge, space, trainer

KERNEL, MOMENT = ("model", "decoder", "kernel"), ("optimizer", "0", "mu", "decoder", "kernel")


def _trained(change=1.0, moment=1.0, loss=3.0):
  start = {KERNEL[1:]: np.ones(100, np.float32)}
  end = {KERNEL: np.full(100, 1 + 0.01 * change, np.float32), MOMENT: np.full(100, moment, np.float32)}
  layout = Layout(leaves=(), description="")
  return trainer.Trained(metrics={"train 0 learning/loss": loss}, start=start, end=end, layout=layout)


@pytest.mark.parametrize(
    "found, name",
    [
        ({"change": 1.01}, "/".join(KERNEL)),
        ({"moment": 1.001}, "/".join(MOMENT)),
        ({"moment": math.nan}, "/".join(MOMENT)),
        ({"loss": 3.001}, "train 0 learning/loss"),
        ({"loss": math.nan}, "train 0 learning/loss"),
    ],
    ids=str,
)
def test_what_is_further_off_than_rounding_is_found_by_name(found, name):
  worst = compare.differences(_trained(**found), _trained(), [_trained()])[0]
  assert worst.name == name and not worst.ratio <= 1


def test_what_rounding_and_the_control_explain_is_no_difference():
  rounded = _trained(change=1 + 1e-5, moment=1 + 1e-6, loss=3 + 1e-6)
  assert all(d.ratio <= 1 for d in compare.differences(rounded, _trained(), [_trained()]))
  assert all(
      d.ratio <= 1 for d in compare.differences(_trained(moment=1.01), _trained(), [_trained(), _trained(moment=1.001)])
  )
  nan = _trained(moment=math.nan, loss=math.nan)
  assert all(d.ratio <= 1 for d in compare.differences(nan, nan, [nan]))


def test_rows_are_full_nearly_empty_and_between():
  segments, positions, masks = trainer.packed(np.random.default_rng(0), 12, 32)
  used = (segments > 0).sum(1)
  assert (used[::3] == 32).all() and (used[1::3] <= 2).all() and len(set(used[2::3])) > 1
  assert (positions[segments == 0] == 0).all() and (segments[:, 0] == 1).all() and not masks.all()


def test_a_seed_draws_the_same_configurations_whatever_is_drawn_beside_them():
  drawn = list(space.draw(3, 2 * len(space.AREAS)))
  assert len({c.text for c in drawn}) == len(drawn) and {c.name.split("-")[0] for c in drawn} == set(space.AREAS)
  [alone] = [c for c in space.draw(3, 2, ["remat"]) if c.name == "remat-3-1"]
  assert alone in drawn


@pytest.mark.slow
def test_the_trial_finds_the_pipeline_of_the_host_that_computes_wrong_values():
  keys = {"base_num_decoder_layers": 8, "per_device_batch_size": 1, "decoder_block": "llama2", "eval_interval": -1}
  stages = {"ici_pipeline_parallelism": 4, "num_pipeline_microbatches": 4, "num_layers_per_pipeline_stage": 1}
  verdict = lambda own: judge.judge(space.Configuration(name="x", keys=keys, pipeline=stages | own)).verdict
  assert verdict({"pipeline_impl": "host", "pipeline_fsdp_ag_per_repeat": True}) == judge.DIFFERENT
  assert verdict({"pipeline_impl": "circular_bsw"}) == judge.EQUAL


STAGES = {"ici_pipeline_parallelism": 2, "num_pipeline_microbatches": 2, "num_layers_per_pipeline_stage": 1}


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys, recurring",
    [
        ({}, 8),  # MaxText 0.2.5: the two masks of each of four layers
        ({"scan_layers": False}, 0),
        ({"pipeline_impl": "circular_bsw", "num_pipeline_microbatches": 2}, 0),
        ({"pipeline_impl": "circular_bsw", **STAGES}, 0),
    ],
    ids=["scan", "no scan", "window", "pipeline"],
)
def test_layers_drop_something_else_in_the_next_step_but_for_those_of_maxtexts_scan(monkeypatch, keys, recurring):
  masks, of_steps = set(), []
  dropout, call = linears.Dropout.__call__, trainer._Recorded.__call__

  def keep(kept):
    if kept.any():  # a device without a part of a stage's activations has zeros
      masks.add((kept.shape, kept.tobytes()))

  def dropping(self, inputs, *args, **kwargs):
    outputs = dropout(self, inputs, *args, **kwargs)
    jax.debug.callback(keep, outputs != 0)
    return outputs

  def stepping(self, *args):
    found = jax.block_until_ready(call(self, *args))
    jax.effects_barrier()
    of_steps.append(set(masks))
    masks.clear()
    return found

  monkeypatch.setattr(linears.Dropout, "__call__", dropping)
  monkeypatch.setattr(trainer._Recorded, "__call__", stepping)
  dropping_keys = {"base_num_decoder_layers": 4, "decoder_block": "llama2", "dropout_rate": 0.2, "enable_dropout": True}
  others = {"per_device_batch_size": 1.0, "eval_interval": -1, "learning_rate": 1e-30}
  configuration = space.Configuration(name="x", keys=dropping_keys | others, pipeline=keys)
  config = trainer.read(configuration.arguments(True))
  with jax.default_prng_impl("threefry2x32"):
    trainer.Training(config, lambda arrays: arrays, devices=jax.devices()[: keys.get("ici_pipeline_parallelism", 1)])
  first, second = of_steps
  assert len(first) == len(second) == 2 + 8 * keys.get("num_pipeline_microbatches", 1)
  assert len(first & second) == recurring


@pytest.mark.slow
def test_a_step_of_fewer_rows_than_devices_trains_with_a_window_as_without():
  # XLA (jax 0.11.2) would end this process if a microbatch's ids were not laid out as all ids are.
  keys = {"base_num_decoder_layers": 2, "decoder_block": "llama2", "per_device_batch_size": 0.5, "eval_interval": -1}
  mesh = {"ici_data_parallelism": 2, "ici_fsdp_parallelism": 2, "ici_expert_parallelism": 2}
  window = {"pipeline_impl": "circular_bsw", "num_pipeline_microbatches": 1, **mesh}
  outcome = judge.judge(space.Configuration(name="x", keys=keys | {"steps": 1}, pipeline=window))
  assert outcome.verdict == judge.EQUAL, outcome

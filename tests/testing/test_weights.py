# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of `maxtext_pp_ext.testing.weights`: the same weights in the layouts of runs with and without a pipeline."""

import jax
from maxtext_pp_ext.testing import weights
from maxtext_pp_ext.testing.weights import PipelineLayout
import numpy as np
import pytest

STAGES = 4


def model_with(stacked, scan_axis):
  decoder = {"decoder_norm": {"scale": 2}, "layers": {"kernel": stacked}}
  return weights.Weights(tree={"token_embedder": {"embedding": 1}, "decoder": decoder}, scan_axis=scan_axis)


def numbered(layers, scan_axis):
  """A model whose layers hold their own numbers."""
  return model_with(np.stack([np.full((5, 6), layer) for layer in range(layers)], scan_axis), scan_axis)


def stages_of(tree):
  return tree["decoder"]["pipeline_module"]["layers"]


@pytest.mark.parametrize("scan_axis", [0, 1, 2])
@pytest.mark.parametrize("repeats", [2, 3])
def test_each_layer_goes_to_its_repeat_and_stage(scan_axis, repeats):
  moved = weights.to_pipeline_layout(numbered(repeats * STAGES, scan_axis), PipelineLayout(stages=STAGES))
  kernel = stages_of(moved)["kernel"]
  assert kernel.shape == (repeats, STAGES, 5, 6)
  for layer in range(repeats * STAGES):
    np.testing.assert_array_equal(kernel[layer // STAGES, layer % STAGES], layer)


@pytest.mark.parametrize("scan_axis", [0, 1, 2])
@pytest.mark.parametrize("scanned", [False, True])
@pytest.mark.parametrize("repeats", [1, 2])
def test_layers_of_a_stage_follow_each_other(scan_axis, scanned, repeats):
  per_stage = 3
  layout = PipelineLayout(stages=STAGES, layers_per_stage=per_stage, scan_layers_per_stage=scanned)
  stages = stages_of(weights.to_pipeline_layout(numbered(repeats * STAGES * per_stage, scan_axis), layout))
  for layer in range(repeats * STAGES * per_stage):
    repeat, stage, index = np.unravel_index(layer, (repeats, STAGES, per_stage))
    at = (repeat, stage) if repeats > 1 else (stage,)
    if scanned:
      of_layer = np.take(stages["scanned_layers"]["kernel"][at], index, axis=scan_axis)
    else:
      of_layer = stages[f"layers_{index}"]["kernel"][at]
    np.testing.assert_array_equal(of_layer, np.full((5, 6), layer))


def test_without_repeats_there_is_no_axis_for_them():
  moved = weights.to_pipeline_layout(model_with(np.zeros((5, STAGES)), 1), PipelineLayout(stages=STAGES))
  assert stages_of(moved)["kernel"].shape == (STAGES, 5)


def test_weights_outside_the_layers_stay_where_they_are_and_the_source_is_not_changed():
  source = model_with(np.zeros((5, STAGES)), 1)
  moved = weights.to_pipeline_layout(source, PipelineLayout(stages=STAGES))
  assert moved["token_embedder"] == {"embedding": 1}
  assert moved["decoder"]["decoder_norm"] == {"scale": 2}
  assert "layers" not in moved["decoder"]
  assert set(source.tree["decoder"]) == {"decoder_norm", "layers"}


def test_layers_that_stages_do_not_divide_are_refused():
  with pytest.raises(ValueError, match="6 layers cannot be divided among 4 stages of 1 layers each"):
    weights.to_pipeline_layout(model_with(np.zeros((5, 6)), 1), PipelineLayout(stages=STAGES))


def test_moved_weights_are_off_by_the_fraction_and_not_all_in_one_direction():
  source = weights.Weights(tree={"a": np.ones((20, 20), np.float32), "b": np.full(50, -3.0, np.float32)}, scan_axis=1)
  moved = weights.moved(source, 2.0**-10)
  ratios = jax.tree.map(lambda a, b: np.ravel(a / b), moved.tree, source.tree)
  ratios = np.concatenate(jax.tree.leaves(ratios))
  assert set(ratios) == {1 - 2.0**-10, 1 + 2.0**-10} and all(w.dtype == np.float32 for w in jax.tree.leaves(moved.tree))
  assert weights.moved(source, 0.0) is source

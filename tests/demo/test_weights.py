# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of `maxtext_pp_ext.demo.weights`: the same weights in the layouts of both runs."""

from maxtext_pp_ext.demo import weights
import numpy as np
import pytest

STAGES = 4


def decoder_with(stacked):
  return {"token_embedder": {"embedding": 1}, "decoder": {"decoder_norm": {"scale": 2}, "layers": {"kernel": stacked}}}


@pytest.mark.parametrize("scan_axis", [0, 1, 2])
@pytest.mark.parametrize("repeats", [2, 3])
def test_each_layer_goes_to_its_repeat_and_stage(scan_axis, repeats):
  layers = [np.full((5, 6), layer) for layer in range(repeats * STAGES)]
  moved = weights.to_pipeline_layout(decoder_with(np.stack(layers, scan_axis)), STAGES, scan_axis)
  kernel = moved["decoder"]["pipeline_module"]["layers"]["kernel"]
  assert kernel.shape == (repeats, STAGES, 5, 6)
  for layer, expected in enumerate(layers):
    np.testing.assert_array_equal(kernel[layer // STAGES, layer % STAGES], expected)


def test_without_repeats_there_is_no_axis_for_them():
  moved = weights.to_pipeline_layout(decoder_with(np.zeros((5, STAGES))), STAGES, 1)
  assert moved["decoder"]["pipeline_module"]["layers"]["kernel"].shape == (STAGES, 5)


def test_weights_outside_the_layers_stay_where_they_are_and_the_source_is_not_changed():
  source = decoder_with(np.zeros((5, STAGES)))
  moved = weights.to_pipeline_layout(source, STAGES, 1)
  assert moved["token_embedder"] == {"embedding": 1}
  assert moved["decoder"]["decoder_norm"] == {"scale": 2}
  assert "layers" not in moved["decoder"]
  assert set(source["decoder"]) == {"decoder_norm", "layers"}


def test_layers_that_stages_do_not_divide_are_refused():
  with pytest.raises(ValueError, match="6 layers cannot be divided among 4 stages"):
    weights.to_pipeline_layout(decoder_with(np.zeros((5, 6))), STAGES, 1)

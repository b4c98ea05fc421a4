# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Guesses of a checkpoint's layout from its paths and shapes."""

import pytest

from maxtext_pp_ext.checkpoint import guess
from tests.checkpoint import models


def shapes(of):
  return {("params", "params", *leaf.path): leaf.shape for leaf in of.leaves}


PIPELINES = [
    (stages, repeats, per_stage, scanned, outside)
    for stages in (2, 3, 4)
    for repeats in (1, 2, 3)
    for per_stage in (1, 2)
    for scanned in (False, True)
    for outside in (0, 1, 4)
]


@pytest.mark.parametrize("lacks", [None, "inside", "outside"])
@pytest.mark.parametrize("stages, repeats, per_stage, scanned, outside", PIPELINES)
def test_a_pipelines_keys_are_among_the_candidates(stages, repeats, per_stage, scanned, outside, lacks):
  """Also if one array lacks."""
  scanned = scanned and per_stage > 1
  of = models.pipeline(stages, repeats, per_stage, scanned=scanned, outside=outside)
  inside = stages * repeats * per_stage
  stored = shapes(of)
  if lacks:
    gone = ("decoder", "pipeline_module" if lacks == "inside" or not outside else "layers_outside_pipeline")
    del stored[next(path for path in stored if path[2:4] == gone)]
  found = list(guess.candidates(stored, layers=inside + outside, scan_layers=None, of_layer=of.of_layer))
  axis = {"param_scan_axis": models.SCAN_AXIS} if scanned or outside else {}
  assert {
      "ici_pipeline_parallelism": stages,
      "num_pipeline_repeats": repeats,
      "num_layers_per_pipeline_stage": per_stage,
      "pipeline_parallel_layers": inside,
      "scan_layers_per_stage": scanned,
      "scan_layers": True,
      **axis,
  } in found


STACKED = {"scan_layers": True, "param_scan_axis": models.SCAN_AXIS}


@pytest.mark.parametrize("of, values", [(models.stacked(4), STACKED), (models.single(4), {"scan_layers": False})])
def test_without_a_pipeline_the_likeliest_is_told_by_numbered_names(of, values):
  first, *_ = guess.candidates(shapes(of), layers=4, scan_layers=None, of_layer=of.of_layer)
  assert first == {"ici_pipeline_parallelism": 1} | values


def test_what_the_checkpoint_says_of_scan_layers_is_not_guessed():
  of = models.single(4)
  found = list(guess.candidates(shapes(of), layers=4, scan_layers=False, of_layer=of.of_layer))
  assert found == [{"ici_pipeline_parallelism": 1, "scan_layers": False}]


# Layers have the shapes (3, 5), (4,) and (). Where one of them does not tell the axis, another does.
@pytest.mark.parametrize("layers", [3, 4, 6])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_the_axis_along_which_layers_are_stacked_follows_from_the_shapes(layers, axis):
  for of in (models.stacked(layers, axis), models.pipeline(2, 3, layers, scanned=True, scan_axis=axis)):
    values = list(guess.candidates(shapes(of), layers=of.number_of_layers, scan_layers=True, of_layer=of.of_layer))
    # Other numbers of stages and repeats, with which no axis fits, are candidates, too.
    assert {each["param_scan_axis"] for each in values if "param_scan_axis" in each} == {axis}, of.description


def test_of_shapes_that_fit_several_axes_each_is_a_candidate_and_of_shapes_that_fit_none_no_axis_is():
  layer, stored = {("w",): {(4, 4)}}, ("params", "params", "decoder", "layers", "w")
  axes = lambda shape: [
      each.get("param_scan_axis")
      for each in guess.candidates({stored: shape}, layers=4, scan_layers=True, of_layer=layer)
  ]
  assert axes((4, 4, 4)) == [0, 1, 2] and axes((4, 5, 4)) == [1] and axes((4, 5, 5)) == [None]

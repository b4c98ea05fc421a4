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


@pytest.mark.parametrize("stages, repeats, per_stage, scanned, outside", PIPELINES)
def test_a_pipelines_keys_are_among_the_candidates(stages, repeats, per_stage, scanned, outside):
  scanned = scanned and per_stage > 1
  of = models.pipeline(stages, repeats, per_stage, scanned=scanned, outside=outside)
  inside = stages * repeats * per_stage
  found = list(guess.candidates(shapes(of), layers=inside + outside, scan_layers=None))
  assert {
      "ici_pipeline_parallelism": stages,
      "num_pipeline_repeats": repeats,
      "num_layers_per_pipeline_stage": per_stage,
      "pipeline_parallel_layers": inside,
      "scan_layers_per_stage": scanned,
      "scan_layers": True,
  } in found


@pytest.mark.parametrize("of, scan_layers", [(models.stacked(4), True), (models.single(4), False)])
def test_without_a_pipeline_the_likeliest_is_told_by_numbered_names(of, scan_layers):
  first, *_ = guess.candidates(shapes(of), layers=4, scan_layers=None)
  assert first == {"ici_pipeline_parallelism": 1, "scan_layers": scan_layers}


def test_what_the_checkpoint_says_of_scan_layers_is_not_guessed():
  found = list(guess.candidates(shapes(models.stacked(4)), layers=4, scan_layers=False))
  assert found == [{"ici_pipeline_parallelism": 1, "scan_layers": False}]

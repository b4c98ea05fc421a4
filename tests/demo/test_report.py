# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of `examples.demo`: which loss curves count as the same."""

import math

import pytest

from examples.demo import __main__ as demo

CURVE = [10.875, 9.04, 7.393, 6.843]


def test_equal_curves_agree():
  assert demo.excess_steps(CURVE, CURVE) == []


def test_curves_that_differ_by_a_rounding_error_agree():
  rounded = [loss * (1 + demo.EPSILON) for loss in CURVE]
  assert demo.excess_steps(rounded, CURVE) == []


# MaxText's own BSW pipeline, wrong at 4 stages, is off by 1.5e-2 at step 0 of the demo.
@pytest.mark.parametrize("step", range(len(CURVE)))
@pytest.mark.parametrize("wrong_by", [1.5e-2, -1.5e-2, math.nan, math.inf])
def test_a_step_that_is_off_by_more_than_float32_explains_is_found(step, wrong_by):
  wrong = list(CURVE)
  wrong[step] += wrong_by
  assert demo.excess_steps(wrong, CURVE) == [step]


def test_a_loss_that_is_nan_in_both_runs_is_not_agreement():
  assert demo.excess_steps([math.nan], [math.nan]) == [0]


def test_curves_of_different_length_are_refused():
  with pytest.raises(ValueError, match="zip"):
    demo.excess_steps(CURVE[:-1], CURVE)


def test_the_picture_is_a_png(tmp_path):
  pytest.importorskip("matplotlib")
  picture = tmp_path / "loss.png"
  demo.write_picture(picture, CURVE, CURVE, "title")
  assert picture.read_bytes().startswith(b"\x89PNG")

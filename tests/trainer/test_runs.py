# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of `runs`. That layers go where they belong is tested in `tests/checkpoint`."""

import jax
import numpy as np

from tests.trainer import runs


def test_moved_weights_are_off_by_the_fraction_and_not_all_in_one_direction():
  source = {"a": np.ones((20, 20), np.float32), "b": np.full(50, -3.0, np.float32)}
  moved = runs.moved(source, 2.0**-10)
  ratios = jax.tree.map(lambda a, b: np.ravel(a / b), moved, source)
  ratios = np.concatenate(jax.tree.leaves(ratios))
  assert set(ratios) == {1 - 2.0**-10, 1 + 2.0**-10} and all(w.dtype == np.float32 for w in jax.tree.leaves(moved))
  assert runs.moved(source, 0.0) is source

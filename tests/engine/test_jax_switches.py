# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Pipelines compute what a loop over their layers computes, whatever switches of JAX a user has turned on."""

from collections.abc import Iterator
import contextlib
from typing import Any

import jax
from maxtext.utils import maxtext_utils
import pytest

from maxtext_pp_ext.testing import parity
from tests.marks import slow_but
from tests.parity.common import LAYERS, make_config

SWITCHES = {
    "jax_enable_x64": True,
    "jax_debug_nans": True,
    "jax_disable_jit": True,
    "jax_enable_checks": True,
    "jax_numpy_dtype_promotion": "strict",
    "jax_default_matmul_precision": "highest",
}
SIZES = [(1, 2), (2, 2), (3, 3)]  # stages and microbatches
CASES = [(name, *sizes) for name in SWITCHES for sizes in SIZES]
# Without jit each operation is a program of its own: a minute for three stages.
QUICK = [case for case in CASES if case[0] != "jax_disable_jit"]


@contextlib.contextmanager
def _switched(name: str, value: Any) -> Iterator[None]:
  before = getattr(jax.config, name)
  assert before != value
  jax.config.update(name, value)
  try:
    yield
  finally:
    jax.config.update(name, before)


@pytest.mark.parametrize("name, stages, microbatches", slow_but(QUICK, CASES, spread=True))
def test_with_a_switch_of_jax_a_pipeline_equals_a_loop_over_its_layers(name, stages, microbatches):
  config = make_config(stages=stages, repeats=2, microbatches=microbatches)
  mesh = maxtext_utils.get_mesh_from_config(config, jax.devices()[: 2 * stages])
  with _switched(name, SWITCHES[name]):
    parity.assert_pipeline_parity(LAYERS["simple"], config, implementations="circular_bsw", mesh=mesh)

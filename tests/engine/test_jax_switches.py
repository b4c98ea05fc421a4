# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Pipelines compute what a loop over their layers computes, whatever switches of JAX a user has turned on."""

from collections.abc import Iterator, Mapping
import contextlib
from typing import Any

import jax
from maxtext.utils import maxtext_utils
import pytest

from maxtext_pp_ext.testing import parity
from tests.marks import slow_but
from tests.parity.common import LAYERS, make_config

SWITCHES = {
    "x64": {"jax_enable_x64": True},
    "x64 and strict promotion": {"jax_enable_x64": True, "jax_numpy_dtype_promotion": "strict"},
    "NaNs": {"jax_debug_nans": True},
    "no jit": {"jax_disable_jit": True},
    "checks": {"jax_enable_checks": True},
    "strict promotion": {"jax_numpy_dtype_promotion": "strict"},
    "highest precision": {"jax_default_matmul_precision": "highest"},
}
SIZES = [(1, 2), (2, 2), (3, 3)]  # stages and microbatches
CASES = [(name, *sizes) for name in SWITCHES for sizes in SIZES]
# Without jit each operation is a program of its own: a minute for three stages. What strict promotion allows is the same
# program without it. Products have one precision on CPUs.
QUICK = [case for case in CASES if case[0] not in ("no jit", "x64", "highest precision") and case[1:] == SIZES[-1]]


@contextlib.contextmanager
def _switched(switches: Mapping[str, Any]) -> Iterator[None]:
  before = {name: getattr(jax.config, name) for name in switches}
  assert not before.items() & switches.items()
  try:
    for name, value in switches.items():
      jax.config.update(name, value)
    yield
  finally:
    for name, value in before.items():
      jax.config.update(name, value)


@pytest.mark.parametrize("name, stages, microbatches", slow_but(QUICK, CASES, spread=True))
def test_with_switches_of_jax_a_pipeline_equals_a_loop_over_its_layers(name, stages, microbatches):
  config = make_config(stages=stages, repeats=2, microbatches=microbatches)
  mesh = maxtext_utils.get_mesh_from_config(config, jax.devices()[: 2 * stages])
  with _switched(SWITCHES[name]):
    parity.assert_pipeline_parity(LAYERS["simple"], config, implementations="circular_bsw", mesh=mesh)

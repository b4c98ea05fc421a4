# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Gathers in steps: the steps follow the torus' axes, and together they gather what one gather does."""

import itertools
import math
import types

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from maxtext_pp_ext.config.derived import gathers_on_sparsecores
from maxtext_pp_ext.engine import transfer
from maxtext_pp_ext.engine.torus import groups, sizes_along, steps_of
from maxtext_pp_ext.engine.weight_layout import WeightLayout
from maxtext_pp_ext.engine.weights import Weights
from maxtext_pp_ext.schedule import Residency
from maxtext_pp_ext.sharding import constrain

F32 = jnp.dtype(jnp.float32)
OFFLOADED = "--xla_tpu_enable_sparse_core_collective_offload_all_gather=true"


@pytest.mark.parametrize("torus", [(4, 4, 8), (4, 1, 8), (2, 2), (8,), (2, 3, 1)])
def test_there_is_a_step_for_each_axis_of_the_torus(torus):
  line = list(itertools.product(*map(range, torus)))
  assert sizes_along(line) == (tuple(n for n in torus if n > 1) or (1,))
  backwards = list(itertools.product(*(range(n)[::-1] for n in torus)))
  assert sizes_along(backwards) == sizes_along(line)


@pytest.mark.parametrize(
    "line",
    [
        [(0, 0)],
        [()] * 4,  # devices without coordinates
        [(0,), (0,), (1,), (1,)],  # two cores of a chip
        [(0, 0), (0, 1), (1, 1), (1, 0), (2, 0), (2, 1), (2, 2)],  # rows of different lengths
    ],
)
def test_a_line_that_is_no_box_is_one_step(line):
  assert sizes_along(line) == (len(line),)


@pytest.mark.parametrize("sizes", [(2, 4), (4, 2), (2, 2, 2), (8,)])
def test_each_device_is_in_one_group_of_each_step_and_steps_from_minor_to_major_reach_all_in_order(sizes):
  reached = {device: [device] for device in range(math.prod(sizes))}
  for step in reversed(groups(sizes)):
    assert sorted(itertools.chain(*step)) == list(range(math.prod(sizes)))
    group_of = {device: group for group in step for device in group}
    reached = {device: [x for other in group_of[device] for x in reached[other]] for device in reached}
  assert all(all_ == sorted(reached) for all_ in reached.values())


def test_meshes_without_a_torus_have_no_steps():
  assert steps_of(Mesh(np.array(jax.devices()).reshape(2, -1), ("stage", "a"))) == ()
  assert steps_of(AbstractMesh((2, 4), ("stage", "a"))) == ()


@pytest.mark.parametrize("sizes", [(2, 4), (2, 2, 2)])
@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize(
    "shape, spec", [((16, 5), P(None, "a", None)), ((6, 24), P(None, None, "a")), ((8,), P(None, "a"))]
)
def test_a_repeat_gathered_in_steps_is_the_repeat(monkeypatch, shape, spec, pieces, sizes):
  monkeypatch.setattr(transfer, "_LEAST_IN_STEPS", 0)
  mesh = Mesh(np.array(jax.devices()[:8]).reshape(1, 8), ("stage", "a"))
  params = constrain(jax.random.normal(jax.random.key(0), (3, 1, *shape)), P(None, *spec), mesh)
  layout = WeightLayout(
      sharded=spec,
      gathered=P(*(None for _ in spec)),
      partial_axes=("a",),
      compute_dtype=F32,
      accumulation_dtype=F32,
      steps=(("a", sizes),),
  )
  weights = Weights(residency=Residency.REPEAT, mesh=mesh, layouts=[layout], pieces=pieces)
  at, following = jnp.array([1]), jnp.array([2])

  @jax.jit
  def prefetch(params):
    loaded = weights.load([params])
    window = weights.window(weights.first(loaded), 0, 3)
    for k in range(pieces):
      piece = jnp.array([k])
      window = weights.place(window, weights.prefetch(window, loaded, following, piece), loaded, at, piece)
    return weights.at(window, loaded, following)[0]

  np.testing.assert_array_equal(prefetch(params), params[2])
  assert prefetch.lower(params).as_text().count("stablehlo.all_gather") == pieces * len(sizes)


@pytest.mark.parametrize("ahead", [True, False])
def test_the_flags_of_the_program_decide_whether_gathers_run_on_sparsecores(monkeypatch, ahead):
  monkeypatch.setenv("LIBTPU_INIT_ARGS", "" if ahead else f"--xla_a=1 {OFFLOADED}")
  both = {"compile_topology": "v5p-8" if ahead else "", "compile_xla_flags": OFFLOADED if ahead else ""}
  assert gathers_on_sparsecores(types.SimpleNamespace(**both))
  monkeypatch.setenv("LIBTPU_INIT_ARGS", OFFLOADED if ahead else "")
  assert not gathers_on_sparsecores(types.SimpleNamespace(**both | {"compile_xla_flags": "" if ahead else OFFLOADED}))

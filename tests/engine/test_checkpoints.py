# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints around whole layers of a stage are dropped, and those within a layer are not."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_pp_ext.engine.programs.checkpoints import recomputed_once
from tests.engine.common import primitives

LAYERS, EMBED = 3, 4


def part(w, x):
  return jnp.tanh(x @ w)


def layer(w, x):
  """With a residual connection, as MaxText's layers have."""
  return x + part(w, x)


def in_turn(of_layer):
  return lambda weights, x: functools.reduce(lambda x, w: of_layer(w, x), weights, x)


def in_a_scan(of_layer):
  return lambda weights, x: jax.lax.scan(lambda x, w: (of_layer(w, x), None), x, weights)[0]


def in_a_call(of_layer):
  return lambda weights, x: jax.jit(in_turn(of_layer))(weights, x)


def with_counter(of_layer):
  """A scan that counts its layers beside, as random streams do."""

  def stage(weights, x):
    body = lambda carry, w: ((of_layer(w, carry[0]), carry[1] + 1), None)
    return jax.lax.scan(body, (x, 0), weights)[0][0]

  return stage


def with_work_between(of_layer):
  """Only a part of what a layer computes is in its checkpoint."""
  return in_turn(lambda w, x: of_layer(w, x) * 2)


def carried_around(of_layer):
  """What an iteration computes outside of the checkpoint, another one reads."""

  def stage(weights, x):
    body = lambda carry, w: ((of_layer(w, carry[0] + carry[1]), carry[0] @ w), None)
    return jax.lax.scan(body, (x, x), weights)[0][0]

  return stage


whole = jax.checkpoint(layer)
twice = jax.checkpoint(whole)
within = lambda w, x: x + jax.checkpoint(part)(w, x)
both = jax.checkpoint(within)

# Stage, its checkpoints, and how many of them stay.
STAGES = {
    "none": (in_turn(layer), 0, 0),
    "in turn": (in_turn(whole), LAYERS, 0),
    "in a scan": (in_a_scan(whole), 1, 0),
    "in a call": (in_a_call(whole), LAYERS, 0),
    "beside a counter": (with_counter(whole), 1, 0),
    "twice": (in_turn(twice), 2 * LAYERS, 0),
    "around the stage": (jax.checkpoint(in_turn(layer)), 1, 0),
    "around the stage and its layers": (jax.checkpoint(in_a_scan(whole)), 2, 0),
    "within layers": (in_turn(within), LAYERS, LAYERS),
    "within layers of a scan": (in_a_scan(within), 1, 1),
    "around layers and within": (in_turn(both), 2 * LAYERS, LAYERS),
    "around a part": (with_work_between(whole), LAYERS, LAYERS),
    "around a part, in a scan": (carried_around(whole), 1, 1),
}
# With a checkpoint around each layer for itself.
LAYER_BY_LAYER = {
    "in turn": LAYERS,
    "in a scan": 1,
    "twice": LAYERS,
    "around the stage": 1,
    "around the stage and its layers": 1,
    "around layers and within": 2 * LAYERS,
}


WEIGHTS = jax.random.normal(jax.random.key(0), (LAYERS, EMBED, EMBED))
X = jax.random.normal(jax.random.key(1), (2, EMBED))


def stage(name):
  return lambda weights, x: (STAGES[name][0](weights, x), {"sown": jnp.sum(x)})


def checkpoints(fn):
  name = jax.make_jaxpr(jax.checkpoint(jnp.sin))(X).jaxpr.eqns[0].primitive.name  # it differs by version of JAX
  return primitives(jax.make_jaxpr(fn)(WEIGHTS, X).jaxpr)[name]


@pytest.mark.parametrize("name", STAGES)
def test_checkpoints_around_whole_layers_are_dropped_and_others_stay(name):
  _, there, stay = STAGES[name]
  assert (checkpoints(stage(name)), checkpoints(recomputed_once(stage(name)))) == (there, stay)


@pytest.mark.parametrize("name, stay", LAYER_BY_LAYER.items())
def test_one_checkpoint_around_each_layer_stays_if_the_run_asks_for_it(name, stay):
  assert checkpoints(recomputed_once(stage(name), layer_by_layer=True)) == stay


@pytest.mark.parametrize("name", ["in a call", "beside a counter", "around the stage and its layers"])
def test_a_stage_computes_the_same_without_them(name):

  def run(fn):
    total = lambda weights, x: sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(fn(weights, x)))
    return jax.jit(jax.value_and_grad(total, argnums=(0, 1)))(WEIGHTS, X)

  found, expected = run(recomputed_once(stage(name))), run(stage(name))
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), found, expected)

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Arrays that move between slots of stages, in as few permutations as they need."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from maxtext_pp_ext.schedule.moves import Move, rounds


def moved(moves: Sequence[Move], axis: str, x: jax.Array, into: jax.Array) -> jax.Array:
  """`into` after the moves, within a `shard_map`.

  Args:
    moves: no two of them to the same slot.
    axis: the mesh axis of the stages.
    x: a stage's slots that arrays come from, [slots, …].
    into: its slots that they go to, [other slots, …].
  """
  stage, stages = jax.lax.axis_index(axis), jax.lax.axis_size(axis)
  for each in rounds(moves):
    sent, got = np.zeros(stages, int), np.full(stages, -1)
    for move in each:
      sent[move.source[0]], got[move.target[0]] = move.source[1], move.target[1]
    one = jax.lax.dynamic_index_in_dim(x, jnp.asarray(sent)[stage], axis=0, keepdims=False)
    if not each[0].is_within:
      one = jax.lax.ppermute(one, axis, [(move.source[0], move.target[0]) for move in each])
    slot = jnp.asarray(got)[stage]
    placed = jax.lax.dynamic_update_index_in_dim(into, one, jnp.maximum(slot, 0), axis=0)
    into = placed if (got >= 0).all() else jnp.where(slot >= 0, placed, into)
  return into

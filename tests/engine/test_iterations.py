# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Loops run each iteration of a phase once, in order, however they are compiled."""

import jax
import jax.numpy as jnp
import pytest

from maxtext_pp_ext.engine.traced import Iterations
from maxtext_pp_ext.schedule import CircularSchedule, Phase


@pytest.mark.parametrize("compiled, compiled_repeats", [(True, True), (False, True), (False, False)])
@pytest.mark.parametrize("microbatches, replaces", [(1, True), (1, False), (3, False)])
def test_each_iteration_of_a_phase_runs_once_and_in_order(microbatches, replaces, compiled, compiled_repeats):
  schedule = CircularSchedule(stages=1, microbatches=microbatches, repeats=4, delay=1)
  iterations = Iterations(schedule=schedule, compiled=compiled, compiled_repeats=compiled_repeats, replaces=replaces)
  assert iterations.turns == (2 if compiled and replaces else 1)

  def run(phase, reverse, in_pairs):
    def note(t, turn, carry):
      assert turn in range(iterations.turns)
      right = t % iterations.turns == turn
      return carry[0] + 1, carry[1].at[carry[0]].set(jnp.where(right, t, -2))

    return jax.jit(lambda: iterations.loop(phase, note, (0, jnp.full(9, -1)), reverse=reverse, in_pairs=in_pairs))()

  for count in range(8):
    expected = list(range(3, 3 + count))
    for reverse, in_pairs in ((False, False), (True, False), (False, True)):
      ran, order = run(Phase(first=3, count=count, advances=False), reverse, in_pairs)
      assert order.tolist() == expected[:: -1 if reverse else 1] + [-1] * (9 - count)
      assert ran == count

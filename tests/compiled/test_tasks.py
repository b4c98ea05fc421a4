# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Steps take turns, their times are compared within a round, and what is said of a step's memory."""

import types

import pytest

from maxtext_pp_ext.compiled import tasks
from maxtext_pp_ext.compiled.step_times import ratio


@pytest.fixture
def clock(monkeypatch):
  """A clock that steps advance."""
  now = [0.0]
  monkeypatch.setattr(tasks.time, "perf_counter", lambda: now[0])
  return now


def test_each_step_stands_at_each_place_of_the_order(clock):
  order, done = [], []

  def step(name, seconds):
    def run():
      order.append(name)
      clock[0] += seconds

    return run

  steps = {name: step(name, seconds) for name, seconds in (("a", 1.0), ("b", 2.0), ("c", 4.0))}
  assert tasks.measure(steps, 4, done.append) == {"a": [1.0] * 4, "b": [2.0] * 4, "c": [4.0] * 4}
  assert "".join(order) == "aabbcc" + "abc" + "bca" + "cab" + "abc"
  assert done == [0, 1, 2, 3, 4]


def test_what_slows_a_round_down_falls_out_of_the_ratio():
  machine = [1.0, 5.0, 1.5, 1.0, 9.0]
  base = [2.0 * slower for slower in machine]
  own = [3.0 * slower for slower in machine]
  assert ratio(own, base) == dict(median=1.5, lower_quartile=1.5, upper_quartile=1.5)


def test_the_spread_is_that_of_the_middle_half():
  found = ratio([1.0, 2.0, 3.0, 4.0, 500.0], [1.0] * 5)
  assert found == dict(median=3.0, lower_quartile=2.0, upper_quartile=4.0)
  assert ratio([3.0], [2.0]) == dict(median=1.5, lower_quartile=1.5, upper_quartile=1.5)


def test_times_of_different_rounds_are_not_compared():
  with pytest.raises(ValueError):
    ratio([1.0, 2.0], [1.0])


@pytest.mark.parametrize("platform, offloaded, peak", [("tpu", 0, 9.0), ("tpu", 1 << 30, None), ("cpu", 0, None)])
def test_the_peak_is_that_of_the_device_or_none(platform, offloaded, peak):
  memory = types.SimpleNamespace(
      temp_size_in_bytes=8 * 10**9,
      peak_memory_in_bytes=9 * 10**9,
      argument_size_in_bytes=2 * 10**9,
      host_temp_size_in_bytes=offloaded,
  )
  found = tasks._memory(types.SimpleNamespace(memory_analysis=lambda: memory), platform)
  assert found["peak_GB"] == peak and found["temp_GB"] == 8.0 and found["arg_GB"] == 2.0

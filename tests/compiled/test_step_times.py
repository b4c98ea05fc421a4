# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""How steps take turns, which is the base, and which has no time. tests/cli/test_compare.py runs real steps."""

import types

import pytest

from maxtext_pp_ext.compiled import child, limits, step_times, tasks

BOUNDS = limits.Limits(seconds=60)


def figures(*seconds, memory=None):
  return {"seconds": list(seconds), "losses": [5.0] * (len(seconds) + 2), "memory": memory, "host_memory_GiB": 1.0}


@pytest.fixture
def fake(monkeypatch):
  """Replaces the processes by figures, by the name that is their last argument; returns the arguments of each."""
  asked = []

  def install(**results):
    left = {name: list(each) for name, each in results.items()}

    def ran(module, arguments, *, bounds, devices, environment, on_tick):  # pylint: disable=unused-argument
      asked.append((*arguments, environment["M_JAX_CACHE_DIR"]))
      on_tick(0.0, 1 << 20)
      return left[arguments[1]].pop(0)

    monkeypatch.setattr(child, "run", ran)
    return asked

  return install


@pytest.mark.parametrize(
    "names, rounds, expected",
    [
        ("abc", 5, [("a", 3), ("b", 3), ("c", 5), ("b", 2), ("a", 2)]),
        ("ab", 4, [("a", 2), ("b", 4), ("a", 2)]),
        ("ab", 1, [("a", 1), ("b", 1)]),
        ("a", 4, [("a", 4)]),
    ],
)
def test_steps_take_turns_forth_and_back(names, rounds, expected):
  found = step_times.turns(list(names), rounds)
  assert found == expected
  assert {name: sum(count for each, count in found if each == name) for name in names} == dict.fromkeys(names, rounds)


def test_figures_of_both_turns_are_joined_and_a_step_that_failed_has_no_second_turn(fake):
  memory = [{"peak": 5, "peak_before_steps": 4}, {"peak": 6, "peak_before_steps": 3}]
  asked = fake(
      a=[figures(1.0, 2.0, memory=memory[0]), figures(3.0, memory=memory[1])],
      b=[{"failure": "RESOURCE_EXHAUSTED"}],
      c=[figures(2.0, 2.0, 6.0)],
  )
  arguments = {name: [name, "jax_cache_dir=/home"] for name in "abc"}
  doing = []
  found = step_times.step_times(
      arguments, rounds=3, bounds=BOUNDS, devices=2, on_tick=lambda text, memory: doing.append((text, memory))
  )
  assert [[count, name] for count, name, _ in asked] == [["2", "a"], ["2", "b"], ["3", "c"], ["1", "a"]]
  caches = {cache for *_, cache in asked}
  assert len(caches) == 1  # one folder, in which the second turn finds the step
  assert doing[0] == ("a, turn 1 of 5", 1 << 20)
  assert found["base"] == "a" and found["steps"]["b"] == {"failure": "RESOURCE_EXHAUSTED"}
  assert found["steps"]["a"]["seconds"] == [1.0, 2.0, 3.0]
  assert found["steps"]["a"]["memory"] == {"peak": 6, "peak_before_steps": 4} and found["steps"]["c"]["memory"] is None
  assert found["steps"]["c"]["ratio"] == {"median": 2.0, "lower_quartile": 1.5, "upper_quartile": 2.0}


def test_a_step_whose_second_turn_fails_has_failed(fake):
  fake(a=[figures(1.0), {"failure": "stopped"}], b=[figures(1.0, 1.0)])
  found = step_times.step_times({"a": ["a"], "b": ["b"]}, rounds=2, bounds=BOUNDS, devices=2)
  assert found["steps"]["a"] == {"failure": "stopped"} and found["base"] == "b"


def test_the_first_step_that_ran_is_the_base():
  steps = {"none": {"failure": "RefusedError: no"}, "host": figures(2.0, 4.0, 3.0), "circular": figures(1.0, 2.0, 3.0)}
  found = step_times.compared(steps)
  assert found["base"] == "host" and found["steps"]["none"] == steps["none"]
  assert found["steps"]["host"]["ratio"]["median"] == 1.0
  assert found["steps"]["host"]["step_s"] == {"median": 3.0, "lower_quartile": 2.5, "upper_quartile": 3.5}
  assert found["steps"]["circular"]["ratio"] == {"median": 0.5, "lower_quartile": 0.5, "upper_quartile": 0.75}
  assert step_times.compared({"none": steps["none"]}) == {"base": None, "steps": {"none": steps["none"]}}


@pytest.mark.parametrize("losses, number", [([1.0, float("nan")], 1), ([float("inf"), 1.0], 0)])
def test_a_step_that_computes_no_number_has_no_time(losses, number):
  found = tasks.checked([0.1], losses)
  assert set(found) == {"failure"} and f"the loss of step {number} is" in found["failure"]
  assert tasks.checked([0.1], [2.0, 1.0]) == {"seconds": [0.1], "losses": [2.0, 1.0]}


def test_memory_in_use_is_that_of_the_fullest_device_if_all_report_it():
  device = lambda stats: types.SimpleNamespace(memory_stats=lambda: stats)
  some, more = device({"peak_bytes_in_use": 3}), device({"peak_bytes_in_use": 7})
  assert tasks.in_use([some, more]) == 7
  assert tasks.in_use([some, device(None)]) is None and tasks.in_use([device({"bytes_in_use": 3})]) is None


@pytest.mark.slow
def test_the_machines_devices_are_found_and_run_a_step(monkeypatch):
  from tests.host.common import TINY

  monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
  machine = child.Machine(platforms="cpu")
  found = machine.devices(BOUNDS)
  assert found["platform"] == "cpu" and found["count"] == 4 and found["kinds"] == {"cpu": 4} and found["processes"] == 1
  keys = [*TINY, "base_num_decoder_layers=2", "skip_jax_distributed_system=True"]
  ran = step_times.step_times({"none": keys}, rounds=2, bounds=limits.Limits(seconds=600), devices=machine)
  step = ran["steps"]["none"]
  assert "failure" not in step, step
  assert len(step["seconds"]) == 2 and step["memory"] is None

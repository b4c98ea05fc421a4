# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""What a simulated step is written down as: figures, a trace, a picture."""

import gzip
import json

import pytest

from maxtext_pp_ext.compiled import compare
from maxtext_pp_ext.compiled.projection import picture, timeline, trace
from tests.compiled.projection import programs
from tests.compiled.projection.test_timeline import BY_INDEX, entry, loop, PERMUTE, W, work


@pytest.fixture(name="found", scope="module")
def _found():
  return programs.simulated(loop(BY_INDEX, trips=40))


def test_a_trace_has_the_steps_length_and_says_how_many_iterations_it_leaves_out(found, tmp_path):
  trace.write(found.step, tmp_path / "step.json.gz", title="a step", shown=1)
  with gzip.open(tmp_path / "step.json.gz") as file:
    events = json.load(file)["traceEvents"]
  blocks = [event for event in events if event["ph"] == "X"]
  lanes = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
  assert max(event["ts"] + event["dur"] for event in blocks) == pytest.approx(found.step.seconds * 1e6)
  left_out = [event["name"] for event in blocks if "not drawn" in event["name"]]
  shown = [event for event in blocks if event["name"].startswith("iteration")]
  assert len(shown) + sum(int(name.split()[0]) for name in left_out) == 40
  assert timeline.COMPUTE in lanes.values()
  inside = [event for event in blocks if lanes[event["tid"]] == timeline.COMPUTE]
  assert all(event["args"]["iteration"].startswith("while ") for event in inside)


def test_blocks_of_a_lane_do_not_overlap(found, tmp_path):
  trace.write(found.step, tmp_path / "step.json.gz", title="a step")
  with gzip.open(tmp_path / "step.json.gz") as file:
    blocks = [event for event in json.load(file)["traceEvents"] if event["ph"] == "X"]
  compute = sorted((event["ts"], event["dur"]) for event in blocks if event["tid"] == 1)
  assert all(start + length <= after + 1e-6 for (start, length), (after, _) in zip(compute, compute[1:], strict=False))


def test_figures_are_those_that_maxtexts_log_has_for_such_a_step(found):
  work_of_step = {"model_flops": 459e12 * found.step.seconds / 2, "tokens": 100, "bubble_fraction": 0.25}
  figures = compare.of_projection(found, programs.CHIP, work_of_step)
  assert figures["mfu"] == pytest.approx(0.5)
  assert figures["tflops_per_s"] == pytest.approx(459 / 2)
  assert figures["tokens_per_s"] == pytest.approx(100 / found.step.seconds)
  assert figures["bubbles_s"] is None  # no stage sends to another in this loop: where the pipeline is, is not known
  assert sum(figures["parts"].values()) == pytest.approx(figures["step_s"])


@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_the_steady_iteration_is_drawn(found, tmp_path, suffix):
  file = tmp_path / f"step{suffix}"
  picture.draw(found.step, file, "a step")
  assert file.stat().st_size > 1000


def test_a_step_without_a_loop_is_its_own_iteration(tmp_path):
  found = programs.simulated(entry(W, "ROOT " + work("x", "a", 3000)))
  assert [name for name, _ in picture.steady(found.step)] == ["step"]
  picture.draw(found.step, tmp_path / "step.svg", "a step")


def test_bubbles_are_the_share_of_the_pipelines_compute_that_idle_stages_do():
  found = programs.simulated(loop(PERMUTE, trips=10))
  figures = compare.of_projection(found, programs.CHIP, {"model_flops": 1.0, "tokens": 1, "bubble_fraction": 0.25})
  assert figures["bubbles_s"] == pytest.approx(0.25 * 10e-6)

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of `cases`: which runs count as the same."""

import json
import math

import pytest

from maxtext_pp_ext.trainer_runs.trainer import RunFailedError
from tests.trainer import cases
from tests.trainer.runs import Results

LOSSES = [4.0 - 0.05 * step for step in range(cases.STEPS)]


def write(folder, name, losses):
  lines = (json.dumps({"learning/loss": loss, "step": step}) for step, loss in enumerate(losses))
  file = folder / "metrics" / name / "0.jsonl"
  file.parent.mkdir(parents=True, exist_ok=True)
  file.write_text("\n".join(lines))


def compare(folder, losses, reference=LOSSES, twin=LOSSES):
  for name, values in {"run": losses, "reference": reference, "reference_twin": twin}.items():
    write(folder, name, values)
  [compared] = cases.compare(Results(folder), "run", "reference", ["learning/loss"])
  return compared


def with_step(step, factor):
  return [loss * (factor if at == step else 1) for at, loss in enumerate(LOSSES)]


@pytest.mark.parametrize("step", [0, 7, cases.STEPS - 1])
@pytest.mark.parametrize("factor", [1 + 2e-6, 1 - 2e-6, math.nan])
def test_a_step_that_is_off_by_more_than_rounding_is_found(tmp_path, step, factor):
  assert not compare(tmp_path, with_step(step, factor)).agrees


@pytest.mark.parametrize("step", [0, 7, cases.STEPS - 1])
def test_a_step_that_is_off_by_a_rounding_error_agrees(tmp_path, step):
  assert compare(tmp_path, with_step(step, 1 + 2.0**-23)).agrees


def test_what_the_twin_has_drifted_apart_is_allowed_from_then_on_and_not_before(tmp_path):
  twin = with_step(7, 1 + 1e-4)
  assert not compare(tmp_path, with_step(6, 1 + 3e-4), twin=twin).agrees
  assert compare(tmp_path, with_step(9, 1 + 3e-4), twin=twin).agrees
  assert not compare(tmp_path, with_step(9, 1 + 5e-4), twin=twin).agrees


def test_a_run_without_all_steps_is_no_agreement(tmp_path):
  with pytest.raises(ValueError, match="zip"):
    compare(tmp_path, LOSSES[:-1])
  with pytest.raises(RunFailedError, match="reference trained 19 of 20 steps"):
    compare(tmp_path, LOSSES[:-1], LOSSES[:-1], LOSSES[:-1])


def test_a_run_that_failed_or_never_began_is_an_error(tmp_path):
  (tmp_path / "failed.error").write_text("Traceback: because")
  with pytest.raises(RunFailedError, match="because"):
    Results(tmp_path).metrics("failed")
  with pytest.raises(RunFailedError, match="has trained no step"):
    Results(tmp_path).metrics("never")

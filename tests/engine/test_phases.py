# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Phases leave out work that nothing needs: a schedule that names one phase for a whole direction trains the same."""

import pytest

from maxtext_pp_ext import registry
from maxtext_pp_ext.engine import backward
from maxtext_pp_ext.host.models import run_config
from maxtext_pp_ext.pipelines.circular import CircularBswPipeline
from maxtext_pp_ext.plan.quantities import gather_policy_with_formulas
from maxtext_pp_ext.schedule import CircularSchedule, Phase
from maxtext_pp_ext.testing import parity
from tests.parity.common import LAYERS, make_config


class OnePhase(CircularSchedule):
  """The circular schedule with one phase per direction, in which there may be nothing to gather or to reduce."""

  def forward_phases(self, *, advances):
    return [Phase(first=0, count=self.iterations, advances=advances)]

  def backward_phases(self, *, advances, reduces):
    return [Phase(first=0, count=self.iterations, advances=advances, reduces=reduces)]


class OnePhasePipeline(CircularBswPipeline):
  schedule_class = OnePhase


def test_a_schedule_with_one_phase_for_a_whole_direction_trains_the_same():
  config = make_config(stages=3, repeats=2, microbatches=3)
  parity.assert_pipeline_parity(LAYERS["simple"], config, implementations=OnePhasePipeline)


def test_checks_and_plans_ask_the_implementation_for_its_schedule(monkeypatch):
  config = make_config(stages=3, repeats=2, microbatches=3)
  other = registry.Implementation(name="one_phase", summary="", load=lambda: OnePhasePipeline)
  monkeypatch.setattr(registry, "_implementations", lambda: {"one_phase": other})
  monkeypatch.setattr(run_config.derived, "pipeline_impl", lambda _: "one_phase")
  assert isinstance(run_config.schedule_of(config), OnePhase)
  assert gather_policy_with_formulas("one_phase") is None


@pytest.mark.parametrize("repeats", range(1, 6))
def test_the_first_iteration_that_reduces_may_have_a_phase_of_its_own(repeats):
  phases = CircularSchedule(stages=1, microbatches=1, repeats=repeats).backward_phases(advances=True, reduces=True)
  apart = backward._first_reduction_apart(phases)
  of = lambda phase: [(t, phase.advances, phase.reduces) for t in range(phase.first, phase.first + phase.count)[::-1]]
  assert [each for phase in apart for each in of(phase)] == [each for phase in phases for each in of(phase)]
  assert [phase.count for phase in apart if phase.reduces][:1] == [1] * (repeats > 1)

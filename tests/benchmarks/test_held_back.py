# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of the steps held back from plan's constants. They compile nothing."""

import itertools
import types

import pytest

from benchmarks import compile_step, held_back, plan_error, policies, shapes, tables


def test_each_policy_meets_each_implementation_and_each_model_each_policy():
  programs = list(held_back.programs())
  unread = [each for each in programs if each.model not in held_back.READ]
  assert len(unread) >= 60 and len({each.model for each in unread}) >= 12
  assert {(each.policy, each.impl) for each in programs} == set(
      itertools.product(held_back.POLICIES, ("none", "window", "circular_bsw"))
  )
  assert {(each.model, each.policy) for each in programs} == set(itertools.product(held_back.MODELS, held_back.POLICIES))


def test_no_model_is_one_that_constants_are_read_off():
  of_tables = {shape.keys.get("model_name") for shape in (*shapes.SHAPES.values(), *policies.SHAPES.values())}
  assert of_tables.isdisjoint(held_back.MODELS)


def test_only_what_has_no_result_is_compiled(tmp_path, monkeypatch):
  labels = []
  figures = {"projection": {"step_s": 1.0}, "peak_GB": 10.0, "wire_total_GB": 1.0, "wire_GB": {}}
  compiled = lambda given, *, label, **options: labels.append(label) or figures
  predicted = types.SimpleNamespace(peak=9e9, sent=1e9, between_slices=0.0), types.SimpleNamespace(seconds=1.2)
  monkeypatch.setattr(compile_step, "compile_step", compiled)
  monkeypatch.setattr(plan_error, "predicted", lambda case: predicted)
  first = next(held_back.programs())
  refused = {"failure": "out of memory", "arguments": first.arguments()}
  tables.write(tmp_path / "found.json", {first.model: {first.name: refused}})
  options = ["--output", str(tmp_path / "found"), "--at-most"]
  held_back.main([*options, "0"])
  assert not labels
  held_back.main([*options, "2"])
  assert labels == [f"{each.model}, {each.name}" for each in list(held_back.programs())[1:3]]
  text = (tmp_path / "found.md").read_text(encoding="utf-8")
  assert f"- {first.model}, {first.name}: out of memory" in text
  assert (
      "Memory is off by 10.0% on average and 10% at most (2 programs), and 100% of the programs are within 10%." in text
  )
  assert "Seconds are off by 20.0% on average and 20% at most (2 programs)." in text


@pytest.mark.parametrize("chip", ["v5e", "v5p", "v6e"])
def test_a_chips_models_have_flags_or_none(chip):
  models = [name for name, shape in held_back.MODELS.items() if str(shape.keys["compile_topology"]).startswith(chip)]
  arguments = [" ".join(program.arguments()) for program in held_back.programs(models)]
  assert len(models) >= 4 and 0 < sum("compile_xla_flags=" in each for each in arguments) < len(arguments)

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""With each of MaxText's sets of sharding rules our implementations train and evaluate as the model does without them.

A set is either that of training, and so of evaluations (`custom_mesh_and_rule`), or that of evaluations alone
(`custom_mesh_and_rule_for_eval`). A mesh without stages is refused for a pipeline.
"""

import functools
import itertools

import pytest

from maxtext_pp_ext.host.models import run_config
from maxtext_pp_ext.trainer_runs.train_runs import run_all
from tests.trainer import cases

MODEL = "moe"
STEPS = 2
FEW_STEPS = {"steps": STEPS, "eval_interval": 1, "eval_steps": 1, "sharding_tolerance": 1.0}
TRAINING, EVALUATION = "custom_mesh_and_rule", "custom_mesh_and_rule_for_eval"
WITH_STAGES = ("cp-as-ep", "ep-as-cp", "pipeline-large-moe", "shard-exp-on-fsdp")
WITHOUT_STAGES = ("pure-fsdp", "ep-as-dp", "fsdp-as-dp-for-attn")
OTHER_FILES = ("2d-fsdp",)  # MaxText 0.2.5 has a name for it, and no file
RULES = (*WITH_STAGES, *WITHOUT_STAGES)
# With 4 stages 3 devices are left, which do not divide the experts.
EXPERT_DEVICES = {1: 2, 2: 2, 4: 1}


def _keys(key, rules, stages, implementation):
  pipeline = cases.PIPELINES[stages] | {"num_layers_per_pipeline_stage": 1, "pipeline_impl": implementation}
  devices = {"ici_fsdp_parallelism": -1}
  if (key, rules) != (TRAINING, "pure-fsdp"):  # whose mesh has one axis
    devices["ici_expert_parallelism"] = EXPERT_DEVICES[stages]
  return FEW_STEPS | pipeline | devices | {key: rules}


ALL = list(itertools.product((TRAINING, EVALUATION), RULES, EXPERT_DEVICES, cases.IMPLEMENTATIONS))
REFUSED = [(key, rules, stages, _) for key, rules, stages, _ in ALL if (key, stages > 1) == (TRAINING, True)]
REFUSED = [case for case in REFUSED if case[1] in WITHOUT_STAGES]
TRAINED = [case for case in ALL if case not in REFUSED]
# Both sets at once: the rules of evaluations on the mesh of each set.
PAIRS = list(itertools.product(WITH_STAGES, RULES))


def _name(key, rules, stages, implementation):
  return f"{key}-{rules}-{stages}-{implementation}"


def _pair(training, evaluation):
  return _keys(TRAINING, training, 2, "circular_bsw") | {EVALUATION: evaluation}


def _run(keys, *rounding):
  return cases.run_of(MODEL, cases.PRETRAIN, keys, *rounding)


GROUPS = {
    key: {_name(*case): _run(_keys(*case)) for case in TRAINED if case[0] == key} for key in (TRAINING, EVALUATION)
} | {"pairs": {f"{training}-{evaluation}": _run(_pair(training, evaluation)) for training, evaluation in PAIRS}}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
  """Group -> the results of its runs, and of the model alone."""

  @functools.cache
  def of(group):
    folder = tmp_path_factory.mktemp(group)
    cases.write_data(folder)
    alone = FEW_STEPS | {"ici_fsdp_parallelism": cases.DEVICES}
    runs = {MODEL: _run(alone), cases.twin_of(MODEL): _run(alone, cases.ROUNDING), **GROUPS[group]}
    return run_all(folder, runs, devices=cases.DEVICES, weights={MODEL: runs[MODEL].keys})

  return of


def _check(results, name):
  bad = [c for c in cases.compare(results, name, MODEL, steps=STEPS) if not c.agrees]
  assert not bad, bad


@pytest.mark.slow
@pytest.mark.parametrize("key, rules, stages, implementation", TRAINED)
def test_with_each_set_of_rules_training_and_evaluations_are_those_of_the_model_alone(
    trained, key, rules, stages, implementation
):
  _check(trained(key), _name(key, rules, stages, implementation))


@pytest.mark.slow
@pytest.mark.parametrize("training, evaluation", PAIRS)
def test_with_each_pair_of_sets_training_and_evaluations_are_those_of_the_model_alone(trained, training, evaluation):
  _check(trained("pairs"), f"{training}-{evaluation}")


@pytest.mark.parametrize("rules", WITHOUT_STAGES)
def test_rules_for_a_mesh_without_stages_are_refused_for_a_pipeline(rules):
  arguments = cases.run_of(MODEL, cases.PRETRAIN, _keys(TRAINING, rules, 2, "circular_bsw")).keys
  absent = {"internal_compile": True, "internal_compile_num_devices": cases.DEVICES}
  with pytest.raises(ValueError, match=f"has no axis 'stage'.*custom_mesh_and_rule='{rules}'"):
    run_config.read(arguments, run_name="x", base_output_directory="x", **absent)


def test_these_are_all_sets_of_maxtext():
  from maxtext.common import common_types

  assert {rule.value for rule in common_types.CustomRule} == {"", *RULES, *OTHER_FILES}

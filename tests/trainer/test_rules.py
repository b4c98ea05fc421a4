# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""With each of MaxText's sets of sharding rules our implementations train and evaluate as the model does without them.

The model has the same set: it decides which tokens experts drop, since each sequence is cut where a set cuts it.

A set is either that of training, and so of evaluations (`custom_mesh_and_rule`), or that of evaluations alone
(`custom_mesh_and_rule_for_eval`). A mesh without stages is refused for a pipeline.
"""

import functools
import itertools

import pytest

from maxtext_pp_ext.host.models import run_config
from tests.trainer import cases
from tests.trainer.runs import run_all

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
# Both axes share the experts with this set, so that data parallelism takes the other 3 devices.
OF_SHARED_EXPERTS = {
    1: {"ici_fsdp_parallelism": 2, "ici_expert_parallelism": 2},
    2: {"ici_fsdp_parallelism": 2},
    4: {"ici_fsdp_parallelism": 1},
}


def _alone(key, rules, stages=1):
  """Keys of the model without a pipeline, on the devices that each of these stages has."""
  if (key, rules) == (TRAINING, "shard-exp-on-fsdp"):
    devices = OF_SHARED_EXPERTS[stages] | {"ici_data_parallelism": -1}
  elif (key, rules) == (TRAINING, "pure-fsdp"):  # whose mesh has one axis
    devices = {"ici_fsdp_parallelism": -1}
  else:
    devices = {"ici_fsdp_parallelism": -1, "ici_expert_parallelism": EXPERT_DEVICES[stages]}
  return FEW_STEPS | devices | {key: rules}


def _keys(key, rules, stages, implementation):
  pipeline = cases.PIPELINES[stages] | {"num_layers_per_pipeline_stage": 1, "pipeline_impl": implementation}
  return pipeline | _alone(key, rules, stages)


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


def _reference(key, rules, stages):
  """Sequences are cut between the expert devices, of which it has as many."""
  return f"{key}-{rules}-alone-{EXPERT_DEVICES[stages]}"


def _reference_of_pair(training, evaluation):
  return f"{training}-{evaluation}-alone"


# Group -> the keys of each of its runs, and of each of its references.
GROUPS = {
    key: (
        {_name(*case): _keys(*case) for case in TRAINED if case[0] == key},
        {_reference(key, rules, stages): _alone(key, rules, stages) for rules in RULES for stages in (1, 4)},
    )
    for key in (TRAINING, EVALUATION)
} | {
    "pairs": (
        {f"{training}-{evaluation}": _pair(training, evaluation) for training, evaluation in PAIRS},
        {_reference_of_pair(*pair): _alone(TRAINING, pair[0]) | {EVALUATION: pair[1]} for pair in PAIRS},
    )
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
  """Group -> the results of its runs and references."""

  @functools.cache
  def of(group):
    folder = tmp_path_factory.mktemp(group)
    cases.write_data(folder)
    pipelined, alone = GROUPS[group]
    runs = {name: _run(keys) for name, keys in (pipelined | alone).items()}
    runs |= {cases.twin_of(name): _run(keys, cases.ROUNDING) for name, keys in alone.items()}
    weights = _run(FEW_STEPS | {"ici_fsdp_parallelism": cases.DEVICES}).keys
    return run_all(folder, runs, devices=cases.DEVICES, weights={MODEL: weights})

  return of


def _check(results, name, reference):
  bad = [c for c in cases.compare(results, name, reference, steps=STEPS) if not c.agrees]
  assert not bad, bad


@pytest.mark.slow
@pytest.mark.parametrize("key, rules, stages, implementation", TRAINED)
def test_with_each_set_of_rules_training_and_evaluations_are_those_of_the_model_alone(
    trained, key, rules, stages, implementation
):
  _check(trained(key), _name(key, rules, stages, implementation), _reference(key, rules, stages))


@pytest.mark.slow
@pytest.mark.parametrize("training, evaluation", PAIRS)
def test_with_each_pair_of_sets_training_and_evaluations_are_those_of_the_model_alone(trained, training, evaluation):
  _check(trained("pairs"), f"{training}-{evaluation}", _reference_of_pair(training, evaluation))


@pytest.mark.parametrize("rules", WITHOUT_STAGES)
def test_rules_for_a_mesh_without_stages_are_refused_for_a_pipeline(rules):
  arguments = cases.run_of(MODEL, cases.PRETRAIN, _keys(TRAINING, rules, 2, "circular_bsw")).keys
  absent = {"internal_compile": True, "internal_compile_num_devices": cases.DEVICES}
  with pytest.raises(ValueError, match=f"has no axis 'stage'.*custom_mesh_and_rule='{rules}'"):
    run_config.read(arguments, run_name="x", base_output_directory="x", **absent)


def test_these_are_all_sets_of_maxtext():
  from maxtext.common import common_types

  assert {rule.value for rule in common_types.CustomRule} == {"", *RULES, *OTHER_FILES}

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""MaxText's own trainers train the same with a pipeline and without: losses, gradient norms, evaluations, of each step.

`cases` has the runs and the bounds of their differences; `python -m tests.trainer.table` prints the differences.
"""

import dataclasses
import functools

from maxtext.utils import muon_utils
import pytest

from maxtext_pp_ext.config import PipelineConfigError
from tests.marks import slow_but
from tests.parity.common import make_config
from tests.trainer import cases
from tests.trainer.runs import run_all

QUICK = (
    cases.Case("dense", cases.PRETRAIN, 3, "circular_bsw"),
    cases.Case("dense", cases.PRETRAIN, 1, "circular_bsw"),
)
FEW = (
    *QUICK,
    # Evaluations have other rules, by which no tokens are divided over stages.
    cases.Case("dense", cases.PRETRAIN, 4, "circular_bsw", ("custom_mesh_and_rule_for_eval=pure-fsdp",)),
    cases.Case("moe", cases.PRETRAIN, 4, "circular_bsw"),
)
FEW_CASES = slow_but([case.name for case in QUICK], {case.name: case for case in FEW})
# Wrong with three stages. It takes one layer per stage, and no evaluation with another batch than the training's: that
# ends in `TypeError: cannot reshape array` in MaxText 0.2.5.
HOST_BSW = cases.Case(
    *("dense", cases.PRETRAIN, 3, "host"),
    (
        *("pipeline_fsdp_ag_per_repeat=true", "eval_interval=-1"),
        *("num_layers_per_pipeline_stage=1", "scan_layers_per_stage=False"),
        "record_internal_nn_metrics=0",  # with which its gradients are NaN (0.2.5)
    ),
)
QUICK_STEPS = 10
# Rounding explains a difference of the same size in the loss, so the smallest that must be noticed is some times that.
SLIGHTLY_OTHER_WEIGHTS = 1e-4


def _train(folder, chosen, *keys, others=False, last=()):
  """Trains the chosen cases and their references: `keys` before those of a case, `last` after them."""
  cases.write_data(folder)
  runs = cases.runs_of(chosen)
  other = {
      f"{case.reference}_other": dataclasses.replace(runs[case.reference], rounding=SLIGHTLY_OTHER_WEIGHTS)
      for case in (chosen if others else ())
  }
  runs = {name: dataclasses.replace(run, keys=[*keys, *run.keys, *last]) for name, run in (runs | other).items()}
  return run_all(folder, runs, devices=cases.DEVICES, weights=cases.weights_of(chosen))


@pytest.fixture(scope="module")
def few(tmp_path_factory):
  """A case -> the results of its run and of those that are trained with it: the quick, or the others of its model."""

  @functools.cache
  def train(is_quick, model):
    chosen = [case for case in (*FEW, HOST_BSW) if (case in QUICK, case.model) == (is_quick, model)]
    # With the learning rates of all steps, of which these are the first.
    few = [f"steps={QUICK_STEPS}", f"eval_interval={QUICK_STEPS // 2}", f"learning_rate_schedule_steps={cases.STEPS}"]
    last = few if is_quick else []
    folder = tmp_path_factory.mktemp(model)
    return _train(folder, chosen, "record_internal_nn_metrics=1", others=not is_quick, last=last)

  return lambda case: train(case in QUICK, case.model)


@pytest.fixture(scope="module")
def all_trained(tmp_path_factory):
  return _train(tmp_path_factory.mktemp("all"), cases.all_cases())


@pytest.fixture(scope="module")
def more_trained(tmp_path_factory):
  return _train(tmp_path_factory.mktemp("more"), cases.more_cases())


def _steps(case):
  return QUICK_STEPS if case in QUICK else cases.STEPS


def _compared(results, run, reference, steps=cases.STEPS):
  return {c.metric: c for c in cases.compare(results, run, reference, steps=steps)}


def _check(results, case, steps=cases.STEPS):
  compared = _compared(results, case.name, case.reference, steps)
  bad = [c for c in compared.values() if not c.agrees]
  assert not bad, bad
  return compared


@pytest.mark.parametrize("case", FEW_CASES)
def test_a_pipeline_trains_and_evaluates_as_the_model_does_without_one(few, case):
  compared = _check(few(case), case, _steps(case))
  # Of the size of rounding: a slow test shows that such weights are found.
  assert max(max(each.allowed) for each in compared.values()) < SLIGHTLY_OTHER_WEIGHTS / 5


@pytest.mark.parametrize("case", FEW_CASES)
def test_a_pipeline_reports_of_each_layer_and_loss_what_the_model_reports_without_one(few, case):
  few = few(case)
  [ours, expected] = (few.metrics(name, "learning/loss")[0] for name in (case.name, case.reference))
  of_layers = [name for name in expected if name.startswith("activ_")]
  assert len(of_layers) == 3 * cases.LAYERS and ours.keys() == expected.keys()
  never_zero = [name for name in expected if "fraction_zero" not in name and expected[name] and "/" in name]
  # A mean of activations of either sign is small by chance: it is measured by their deviation.
  means = [name for name in of_layers if name.startswith("activ_mean/")]
  never_zero = [name for name in never_zero if name.startswith(("activ_", "learning/")) and name not in means]
  bad = [c for c in cases.compare(few, case.name, case.reference, never_zero, _steps(case)) if not c.agrees]
  assert not bad, bad
  assert all(ours[name] == expected[name] == 0 for name in of_layers if "fraction_zero" in name)
  assert len(means) == cases.LAYERS
  for name in means:
    assert abs(ours[name] - expected[name]) < 1e-5 * expected[name.replace("activ_mean", "activ_stdev")], name


@pytest.mark.slow
@pytest.mark.parametrize("case", cases.more_cases(), ids=lambda case: case.name)
def test_pipelines_of_models_with_more_kinds_of_losses_and_experts_train_as_the_models_do(more_trained, case):
  _check(more_trained, case)
  losses = [metrics.get("learning/indexer_loss", 0.0) for metrics in more_trained.metrics(case.name, "learning/loss")]
  assert all(loss > 0 for loss in losses) == (case.model == "indexer")


@pytest.mark.slow
@pytest.mark.parametrize("case", cases.all_cases(), ids=lambda case: case.name)
def test_every_pipeline_trains_and_evaluates_as_the_model_does_without_one(all_trained, case):
  _check(all_trained, case)


@pytest.mark.slow
def test_the_comparison_finds_the_pipeline_of_the_host_that_computes_wrong_values(few):
  compared = list(cases.compare(few(HOST_BSW), HOST_BSW.name, HOST_BSW.reference, cases.TRAIN_METRICS))
  assert len(compared) == 2 and not any(c.agrees for c in compared)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in FEW if case not in QUICK], ids=lambda case: case.name)
def test_the_comparison_finds_weights_that_are_off_by_one_in_ten_thousand(few, case):
  compared = _compared(few(case), f"{case.reference}_other", case.reference)
  assert not any(compared[metric].agrees for metric in cases.METRICS)


@pytest.mark.parametrize("case", FEW_CASES)
def test_the_model_learns_and_its_experts_are_balanced(few, case):
  steps = few(case).metrics(case.reference, "learning/loss")
  assert steps[-1]["learning/loss"] < 0.95 * steps[0]["learning/loss"]
  assert all((m["learning/moe_lb_loss"] > 0.05) == (case.model == "moe") for m in steps)


def test_maxtext_lets_muon_orthogonalize_repeats_for_rows():
  """Why `opt_type=muon` is refused. If this test fails, MaxText has changed, and the refusal may be removed."""
  of_mlp = ("layers", "mlp", "wi_0", "kernel")
  alone = muon_utils.transform_logic(("decoder", *of_mlp), shape=(24, 12, 48))  # [embed, layer, mlp]
  pipelined = muon_utils.transform_logic(("decoder", "pipeline_module", *of_mlp), shape=(2, 3, 24, 48))
  assert alone.reduction_axis == pipelined.reduction_axis == (0,)


def test_an_evaluation_that_the_pipeline_cannot_divide_is_refused_before_anything_is_built():
  keys = {"stages": 4, "repeats": 2, "microbatches": 8, "eval_interval": 1, "eval_per_device_batch_size": 1.5}
  with pytest.raises(PipelineConfigError, match="Set eval_per_device_batch_size=2 or num_pipeline_microbatches=4"):
    make_config(**keys)

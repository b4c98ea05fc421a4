# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The table has every key of MaxText, its statements are true, and the sweep compares the right values."""

import itertools
import math
import pathlib
import re

import pytest

from maxtext_pp_ext import config as keys
from maxtext_pp_ext.host.models import run_config
from maxtext_pp_ext.host.patch_points import install, version
from tests.key_coverage import __main__ as command
from tests.key_coverage import sweep, table

NEWEST = "0.2.5"
CHECKOUT = pathlib.Path(__file__).resolve().parents[2]
ENTRIES = table.entries()
EXAMPLES = [
    pytest.param(key, kind, refusal, id=f"{key}-{kind}-{number}")
    for key, entry in ENTRIES.items()
    for kind in ("refused", "host")
    for number, refusal in enumerate(getattr(entry, kind))
]
# A part of what takes two minutes.
QUICK = EXAMPLES[::12]
# Twelve devices, none of which has to be there.
_DEVICES = {"internal_compile": True, "internal_compile_num_devices": 12}


def test_every_key_of_maxtext_has_an_entry():
  install.install()
  from maxtext.configs import types

  has = set(types.MaxTextConfig.model_fields)
  assert not has - set(ENTRIES), "say in tests/key_coverage/keys.yml what these can do to a pipelined model"
  assert set(ENTRIES) <= has or version.found_version() != NEWEST


@pytest.mark.parametrize("test", sorted({test for entry in ENTRIES.values() for test in entry.tests}))
def test_a_test_that_the_table_names_is_there(test):
  file, _, name = test.partition("::")
  assert (CHECKOUT / file).is_file()
  assert not name or re.search(rf"^def {re.escape(name)}\(", (CHECKOUT / file).read_text(encoding="utf-8"), re.MULTILINE)


def _check(key, kind, refusal, folder):
  pipelined = sweep.Configuration(model="dense", stages=3, pipeline_impl="circular_bsw", keys=refusal.keys, drawn=(key,))
  arguments = pipelined.runs("x")["x_pipeline"].keys
  given = {} if _DEVICES.keys() & refusal.keys.keys() else dict(_DEVICES)
  if not {"run_name", "base_output_directory"} & refusal.keys.keys():
    given |= {"run_name": "x", "base_output_directory": str(folder)}
  with pytest.raises(Exception, match=re.escape(refusal.says)) as refused:
    run_config.read(arguments, **given)
  ours = isinstance(refused.value, keys.PipelineConfigError) or "with the pipeline configuration" in str(refused.value)
  assert ours == (kind == "refused")


@pytest.mark.parametrize("key, kind, refusal", QUICK)
def test_a_config_that_the_table_calls_refused_is_refused(tmp_path, key, kind, refusal):
  _check(key, kind, refusal, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("key, kind, refusal", [example for example in EXAMPLES if example not in QUICK])
def test_every_config_that_the_table_calls_refused_is_refused(tmp_path, key, kind, refusal):
  _check(key, kind, refusal, tmp_path)


def test_all_that_was_swept_agrees_and_is_of_each_model_number_of_stages_and_implementation():
  swept = command.read(command.swept_file(NEWEST)).values()
  assert {outcome.verdict for _, outcome in swept} == {sweep.AGREES}
  places = {(each.model, each.stages, each.pipeline_impl) for each, _ in swept}
  assert places == set(itertools.product(table.MODELS, sweep.STAGES, sweep.IMPLEMENTATIONS))


def test_enough_configurations_were_swept():
  assert len(command.read(command.swept_file(NEWEST))) >= sweep.ENOUGH


@pytest.mark.skipif(version.found_version() != NEWEST, reason="defaults differ by version")
def test_every_key_for_the_sweep_was_swept_at_two_values():
  trained = command.trained()
  assert not {key for key, entry in ENTRIES.items() if entry.equal} - trained


def test_the_table_of_the_documentation_has_a_row_for_each_key_and_says_of_each_value_whether_it_was_trained():
  trained = command.trained()
  rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", "\n".join(table.markdown(table.groups(), trained)), re.MULTILINE)
  assert [key for key, _ in rows] == list(ENTRIES) and all(said.strip() for _, said in rows)
  assert {key for key, said in rows if said.startswith("trained equal: ")} == {k for k, e in ENTRIES.items() if e.equal}
  assert sum(table.counts().values()) == len(ENTRIES)


def steps(*losses, **others):
  return [{"learning/loss": loss, **others} for loss in losses]


@pytest.mark.parametrize(
    "found, verdict",
    [
        (steps(4.0, 3.0), sweep.AGREES),
        (steps(4.0, 3.0 * (1 + 2.0**-22)), sweep.AGREES),
        (steps(4.0, 3.0 * (1 + 2.0**-18)), sweep.DIFFERS),
        (steps(4.0, math.nan), sweep.DIFFERS),
        (steps(4.0), sweep.DIFFERS),
        (steps(4.0, 3.0, more=1.0), sweep.DIFFERS),
    ],
)
def test_a_difference_that_rounding_does_not_explain_is_found(found, verdict):
  expected = steps(4.0, 3.0)
  assert sweep.compare(expected, expected, found, 2.0**-22).verdict == verdict


@pytest.mark.parametrize("name", sweep.TRAINED)
def test_a_model_that_is_not_trained_agrees_with_none(name):
  expected = [{"learning/loss": 4.0, "learning/raw_grad_norm": 1.0, name: 0.0}]
  assert sweep.compare(expected, expected, expected, 2.0**-22).verdict != sweep.AGREES


def test_what_rounding_does_to_the_twin_is_allowed_from_then_on():
  expected, twin = steps(4.0, 3.0, 2.0), steps(4.0, 3.0 * (1 + 1e-4), 2.0)
  assert sweep.compare(expected, twin, steps(4.0, 3.0, 2.0 * (1 + 3e-4)), 2.0**-22).verdict == sweep.AGREES
  assert sweep.compare(expected, twin, steps(4.0 * (1 + 3e-4), 3.0, 2.0), 2.0**-22).verdict == sweep.DIFFERS


def test_every_value_is_drawn_once_with_what_it_needs_and_without_what_it_excludes():
  defaults = {key: entry.equal[0] if entry.equal else None for key, entry in ENTRIES.items()}
  drawn = list(sweep.draw(defaults, set(), seed=0))
  items = [(key, repr(each.keys[key])) for each in drawn for key in each.drawn]
  assert sorted(items) == sorted((entry.key, repr(value)) for entry, value in sweep.values_to_draw(defaults))
  for each in drawn:
    for entry in map(ENTRIES.get, each.drawn):
      assert each.model in entry.models and entry.with_keys.items() <= each.keys.items()
      assert not set(entry.not_with) & set(each.keys)


def test_a_value_is_held_only_by_configurations_with_the_keys_that_it_needs():
  key = "mtp_eval_target_module"
  needs = dict(ENTRIES[key].with_keys)
  assert "eval_interval" in needs
  of = lambda **keys: sweep.Configuration(model="moe", stages=2, pipeline_impl="circular", keys=keys, drawn=(key,))
  assert sweep.held([of(**{key: 1}, **needs)], {key: 0})[key] == [1]
  assert sweep.held([of(**{key: 1}, mtp_num_layers=1)], {key: 0})[key] == []


SAMPLE = sweep.Configuration(
    model="moe",
    stages=3,
    pipeline_impl="circular_bsw",
    keys={
        "trainable_parameters_mask": ["norm", "^decoder/layers/", "^decoder/pipeline_module/layers/"],
        "gradient_clipping_threshold": 0.1,
        "z_loss_multiplier": 0.01,
    },
    drawn=("trainable_parameters_mask", "gradient_clipping_threshold", "z_loss_multiplier"),
)


@pytest.mark.slow
def test_a_sample_of_the_sweep_trains_equal(tmp_path):
  sweep.write_text(tmp_path)
  [found] = sweep.train(tmp_path, {"sample": SAMPLE}).values()
  assert found.verdict == sweep.AGREES, found

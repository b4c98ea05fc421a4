# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Which configs a process-wide default of `pipeline_impl` reaches, and what it changes there."""

import pytest

from maxtext_pp_ext.host.replacements import defaults


def test_without_a_default_the_keys_of_a_config_are_returned_as_they_are():
  values = {"ici_pipeline_parallelism": 4, "pipeline_fsdp_ag_once": True}
  assert defaults.apply_default_pipeline_impl(values) is values


@pytest.mark.parametrize(
    "keys", [{"ici_pipeline_parallelism": 4}, {"dcn_pipeline_parallelism": 2}, {"ici_pipeline_parallelism": "2"}]
)
def test_a_config_with_a_pipeline_gets_the_default(keys):
  with defaults.override_pipeline_impl("circular_bsw"):
    assert defaults.apply_default_pipeline_impl(keys) == {**keys, "pipeline_impl": "circular_bsw"}


@pytest.mark.parametrize(
    "keys", [{}, {"ici_pipeline_parallelism": 1, "dcn_pipeline_parallelism": 1}, {"ici_pipeline_parallelism": None}]
)
def test_a_config_without_a_pipeline_is_left_alone(keys):
  with defaults.override_pipeline_impl("circular_bsw"):
    assert defaults.apply_default_pipeline_impl(keys) is keys
  with defaults.override_pipeline_impl("circular_bsw", all_configs=True):
    assert defaults.apply_default_pipeline_impl(keys) == {**keys, "pipeline_impl": "circular_bsw"}
    not_scanned = {**keys, "scan_layers": "False"}
    assert defaults.apply_default_pipeline_impl(not_scanned) is not_scanned


def test_a_config_that_names_an_implementation_keeps_it_and_its_host_keys():
  values = {"ici_pipeline_parallelism": 4, "pipeline_impl": "host", "pipeline_fsdp_ag_per_repeat": True}
  reports = []
  with defaults.override_pipeline_impl("circular_bsw", reports.append):
    assert defaults.apply_default_pipeline_impl(values) is values
  assert reports == [defaults.ConfigReport(pipeline_impl="host", explicit=True)]


def test_contradicting_host_keys_are_turned_off_and_reported_without_touching_the_callers_dict():
  values = {"ici_pipeline_parallelism": 4, "pipeline_fsdp_ag_once": True, "pipeline_fsdp_ag_per_repeat": False}
  before = dict(values)
  reports = []
  with defaults.override_pipeline_impl("circular_bsw", reports.append):
    changed = defaults.apply_default_pipeline_impl(values)
  assert changed == {
      "ici_pipeline_parallelism": 4,
      "pipeline_impl": "circular_bsw",
      "pipeline_fsdp_ag_once": False,
      "pipeline_fsdp_ag_per_repeat": False,
  }
  assert values == before
  assert [r.switched_off for r in reports] == [("pipeline_fsdp_ag_once",)]


def test_the_default_host_leaves_the_hosts_own_modes_on():
  values = {"ici_pipeline_parallelism": 4, "pipeline_fsdp_ag_once": True}
  with defaults.override_pipeline_impl("host"):
    assert defaults.apply_default_pipeline_impl(values) == {**values, "pipeline_impl": "host"}


def test_an_override_ends_with_its_block_and_brings_back_the_one_around_it():
  keys = {"ici_pipeline_parallelism": 2}
  with defaults.override_pipeline_impl("circular"):
    with pytest.raises(KeyError), defaults.override_pipeline_impl("circular_bsw"):
      raise KeyError
    assert defaults.apply_default_pipeline_impl(keys)["pipeline_impl"] == "circular"
  assert defaults.apply_default_pipeline_impl(keys) is keys

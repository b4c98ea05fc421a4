# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of `maxtext_pp_ext.registry`, with small packages that are installed into a temporary folder."""

import dataclasses
import subprocess
import sys
import textwrap

import pytest

from maxtext_pp_ext import registry
from maxtext_pp_ext.schedule import CircularSchedule, GatherPolicy

GOOD_PIPELINE = """
from flax import nnx


class GoodPipeline(nnx.Module):

  def __init__(self, config, stage_factory, mesh, remat_policy=None, *, rngs):
    self.layers = stage_factory(rngs)

  def __call__(self, inputs, segment_ids, positions, deterministic, model_mode="train", logical_partition_spec=None):
    return inputs

  def get_weight_sharding(self, *init_args):
    return None
"""


@pytest.fixture
def install_package(tmp_path, monkeypatch):
  """Installs a one-module package with entry points, as `pip install --target` would; returns a function."""
  monkeypatch.syspath_prepend(tmp_path)
  registry.reset()

  def install(name, source, entry_points):
    (tmp_path / f"{name}.py").write_text(textwrap.dedent(source))
    info = tmp_path / f"{name}-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
    lines = [f"{key} = {value}" for key, value in entry_points.items()]
    (info / "entry_points.txt").write_text("\n".join([f"[{registry.ENTRY_POINT_GROUP}]", *lines, ""]))

  yield install
  registry.reset()


def test_the_built_in_names_are_known_in_a_fixed_order():
  assert registry.names()[:4] == ("host", "circular", "circular_bsw", "circular_ag_once")


def test_an_implementation_cannot_be_changed():
  with pytest.raises(dataclasses.FrozenInstanceError):
    registry.get("circular").name = "other"


def test_every_implementation_has_a_summary_of_one_line():
  for name in registry.names():
    summary = registry.get(name).summary
    assert summary and "\n" not in summary


def test_asking_for_names_imports_neither_jax_nor_a_pipeline():
  code = (
      "import sys; from maxtext_pp_ext import registry; registry.names(); registry.get('circular_bsw'); "
      "bad = [m for m in sys.modules if m.split('.')[0] in ('jax', 'flax', 'pydantic', 'maxtext')"
      " or m.startswith('maxtext_pp_ext.pipelines')]; print(bad)"
  )
  result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
  assert result.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "name, nearest",
    [("circular_bws", "circular_bsw"), ("Circular-BSW", "circular_bsw"), ("cirkular", "circular"), ("hots", "host")],
)
def test_an_unknown_name_is_refused_with_all_known_names_and_the_nearest(name, nearest):
  with pytest.raises(registry.UnknownImplementationError) as error:
    registry.get(name)
  message = str(error.value)
  assert f"did you mean {nearest!r}" in message and name in message
  assert all(repr(known) in message for known in registry.names())


@pytest.mark.parametrize("name", ["zzz", "", None, 3, ["zzz"]])
def test_a_name_that_resembles_none_gets_no_suggestion(name):
  with pytest.raises(registry.UnknownImplementationError) as error:
    registry.get(name)
  assert "did you mean" not in str(error.value) and "'circular_bsw'" in str(error.value)


def test_what_a_class_of_ours_has_beside_its_methods_is_in_its_contract():
  contract = registry.get("circular_bsw").contract
  assert contract.gather_policy is GatherPolicy.REPEAT and contract.shards_automatically
  assert contract.run_scanned == contract.module_class.run_scanned


def test_host_names_no_class():
  with pytest.raises(ValueError, match="MaxText chooses"):
    registry.get("host").load()


def test_an_installed_package_adds_an_implementation_that_is_imported_only_when_loaded(install_package):
  install_package("good_plugin", GOOD_PIPELINE, {"good": "good_plugin:GoodPipeline"})
  implementation = registry.get("good")
  assert registry.names()[-1] == "good" and "good_plugin 1.2" in implementation.summary
  assert "good_plugin" not in sys.modules
  contract = implementation.contract
  assert contract.module_class.__name__ == "GoodPipeline" and contract.schedule_class is CircularSchedule
  assert (contract.gather_policy, contract.run_scanned, contract.shards_automatically) == (None, None, False)
  del sys.modules["good_plugin"]


def test_names_do_not_change_once_they_were_asked_for(install_package):
  before = registry.names()
  install_package("late_plugin", GOOD_PIPELINE, {"late": "late_plugin:GoodPipeline"})
  assert registry.names() == before


def test_a_package_that_claims_a_built_in_name_is_refused_by_its_name(install_package):
  install_package("greedy_plugin", GOOD_PIPELINE, {"circular_bsw": "greedy_plugin:GoodPipeline"})
  with pytest.raises(registry.PluginError, match=r"greedy_plugin 1\.2 claims .*'circular_bsw'.*maxtext_pp_ext itself"):
    registry.names()


def test_two_packages_that_claim_one_name_are_refused(install_package):
  install_package("first_plugin", GOOD_PIPELINE, {"twice": "first_plugin:GoodPipeline"})
  install_package("second_plugin", GOOD_PIPELINE, {"twice": "second_plugin:GoodPipeline"})
  with pytest.raises(registry.PluginError) as error:
    registry.get("circular")
  assert "first_plugin 1.2" in str(error.value) and "second_plugin 1.2" in str(error.value)


def test_a_package_that_raises_on_import_gives_one_error_with_its_cause_and_does_not_harm_the_others(install_package):
  install_package("broken_plugin", "raise OSError('no such library')", {"broken": "broken_plugin:Pipeline"})
  assert registry.get("circular").name == "circular"
  with pytest.raises(registry.PluginError, match=r"broken_plugin 1\.2 cannot be imported: OSError: no such library"):
    registry.get("broken").load()


@pytest.mark.parametrize(
    "source, reason",
    [
        ("Pipeline = 3", "it is an object of type int"),
        ("def Pipeline(config): pass", "it is an object of type function"),
        ("class Pipeline: pass", "not derived from flax.nnx.Module"),
        ("from flax import linen\nclass Pipeline(linen.Module): pass", "not derived from flax.nnx.Module"),
        (GOOD_PIPELINE.replace("get_weight_sharding", "sharding").replace("Good", ""), "no method get_weight_sharding"),
        (GOOD_PIPELINE.replace("stage_factory, mesh", "layers, mesh").replace("Good", ""), "takes no stage_factory"),
        (
            GOOD_PIPELINE.replace("Good", "") + "  gather_policy = 'repeat'\n",
            "expected a maxtext_pp_ext.schedule.GatherPolicy",
        ),
        (GOOD_PIPELINE.replace("Good", "") + "  schedule_class = int\n", "expected a class with of_config(config)"),
    ],
)
def test_an_object_that_is_no_pipeline_is_refused_with_the_reason(install_package, source, reason):
  install_package("wrong_plugin", source, {"wrong": "wrong_plugin:Pipeline"})
  try:
    with pytest.raises(registry.PluginError) as error:
      registry.get("wrong").load()
  finally:
    sys.modules.pop("wrong_plugin", None)
  assert reason in str(error.value) and "wrong_plugin 1.2" in str(error.value)

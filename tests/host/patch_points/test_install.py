# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of `install` and `uninstall`: before and after MaxText's import, repeated, undone, failing."""

import sys
import threading
import types

import pytest

import maxtext_pp_ext
from maxtext_pp_ext.host import startup
from maxtext_pp_ext.host.patch_points import install, rebind, table, version
from maxtext_pp_ext.host.replacements import factory

# What is replaced in a process that has imported the trainer's modules.
TOUCHED = {
    "maxtext.configs.types.MaxTextConfig",
    "maxtext.configs.types.RLConfig",
    "maxtext.configs.pyconfig.initialize's default",
    "maxtext.configs.pyconfig.initialize_pydantic's default",
    "maxtext.configs.pyconfig._initialize_pydantic's default",
    "maxtext.configs.pyconfig._prepare_for_pydantic's default",
    "maxtext.configs.pyconfig._prepare_for_pydantic",
    "maxtext.layers.pipeline.create_nnx_pipeline",
    "maxtext.layers.pipeline.create_pipeline",
    "maxtext.layers.nnx_decoders.create_nnx_pipeline",
    "maxtext.layers.nnx_decoders.NNXDecoder.__call__",
    "maxtext.layers.nnx_decoders.NNXDecoder.get_decoder_layers",
    "maxtext.layers.nnx_decoders.NNXDecoder._get_pipeline_stage_module",
    "maxtext.utils.model_creation_utils.create_nnx_abstract_model",
    "maxtext.utils.model_creation_utils.from_pretrained",
    "maxtext.common.checkpointing.load_state_if_possible",
}

# The training engine needs packages that training does not.
NOT_IMPORTED = ("maxtext.training_engine.checkpointing",)


@pytest.fixture
def disconnected():
  """Imports MaxText without any of our patch points."""
  import maxtext
  from maxtext.common import checkpointing  # noqa: F401  pylint: disable=unused-import
  from maxtext.configs import pyconfig  # noqa: F401  pylint: disable=unused-import
  from maxtext.layers import nnx_decoders  # noqa: F401  pylint: disable=unused-import
  from maxtext.utils import model_creation_utils  # noqa: F401  pylint: disable=unused-import

  assert maxtext.MaxTextConfig  # the package caches it
  before = install.status()
  install.uninstall()
  yield
  install.uninstall()
  if before.hooked:
    install.install()


def _bound_names():
  """Everything in MaxText that a patch point could touch, by name."""
  from maxtext.configs import pyconfig
  from maxtext.layers import nnx_decoders

  bound = {}
  for name, module in list(sys.modules.items()):
    if name.split(".")[0] == "maxtext":
      bound |= {
          f"{name}.{key}": value for key, value in vars(module).items() if isinstance(value, (type, types.FunctionType))
      }
  bound["__call__"] = nnx_decoders.NNXDecoder.__call__
  for name in ("initialize", "initialize_pydantic", "_initialize_pydantic", "_prepare_for_pydantic"):
    bound[f"{name} defaults"] = getattr(pyconfig, name).__defaults__
  return bound


def test_installing_after_maxtext_was_imported_reaches_every_place(disconnected):
  report = maxtext_pp_ext.install()
  assert report.changed and report.hooked and report.skipped == ()
  assert set(report.pending) == {name for name in NOT_IMPORTED if name not in sys.modules}
  assert TOUCHED | {"maxtext.MaxTextConfig"} <= set(report.touched)


@pytest.mark.slow
def test_installing_twice_changes_nothing_the_second_time(disconnected):
  first = maxtext_pp_ext.install()
  bound = _bound_names()
  second = maxtext_pp_ext.install()
  assert not second.changed and second.touched == first.touched
  assert all(_bound_names()[name] is value for name, value in bound.items())


def test_uninstalling_puts_back_every_object(disconnected):
  before = _bound_names()
  maxtext_pp_ext.install()
  changed = {name for name, value in _bound_names().items() if before.get(name) is not value}
  assert len(changed) >= 10
  report = maxtext_pp_ext.uninstall()
  after = _bound_names()
  assert report.changed and not report.hooked and report.touched == () and report.pending == ()
  defaults = {name for name in before if name.endswith(" defaults")}
  assert all(after[name] is value for name, value in before.items() if name not in defaults)
  assert all(after[name] == before[name] for name in defaults)
  assert not maxtext_pp_ext.uninstall().changed


def test_after_uninstalling_the_key_is_unknown_again(disconnected):
  from maxtext.configs import pyconfig

  maxtext_pp_ext.install()
  maxtext_pp_ext.uninstall()
  with pytest.raises(ValueError, match="'pipeline_impl' not in"):
    pyconfig.initialize([""], run_name="x", pipeline_impl="host")


def test_a_patch_point_that_does_not_fit_stops_installation_before_anything_is_touched(disconnected, monkeypatch):
  from maxtext.layers import pipeline

  monkeypatch.setattr(pipeline, "create_nnx_pipeline", lambda config, layers, rules: None)
  before = _bound_names()
  with pytest.raises(version.HostVersionError, match=r"create_nnx_pipeline\(config, layers, rules\)"):
    maxtext_pp_ext.install()
  assert all(_bound_names()[name] is value for name, value in before.items())
  assert not install.status().hooked


def test_a_feature_that_does_not_fit_is_missing_alone_and_refused_where_it_is_needed(disconnected, monkeypatch):
  from maxtext.layers import nnx_decoders, pipeline

  monkeypatch.setattr(pipeline, "create_pipeline", lambda config, layers, rules: "MaxText's own")
  monkeypatch.delattr(nnx_decoders.NNXDecoder, "_create_scanned_layers")
  report = maxtext_pp_ext.install()
  assert report.hooked and [text.partition(":")[0] for text in report.missing] == [
      table.LINEN.name,
      table.WINDOW.name,
  ]
  assert "create_pipeline(config, layers, rules)" in report.missing[0]
  host, ours = types.SimpleNamespace(pipeline_impl="host"), types.SimpleNamespace(pipeline_impl="circular_bsw")
  monkeypatch.setattr(factory, "announce", lambda config: None)
  assert pipeline.create_pipeline(host, None, None) == "MaxText's own"
  with pytest.raises(version.MissingFeatureError, match="needs pipelines in Linen models"):
    pipeline.create_pipeline(ours, None, None)
  window = types.SimpleNamespace(pipeline_impl="circular_bsw", ici_pipeline_parallelism=1, dcn_pipeline_parallelism=1)
  with pytest.raises(version.MissingFeatureError, match="needs implementations without a pipeline"):
    nnx_decoders.NNXDecoder.__call__(types.SimpleNamespace(config=window))
  assert not maxtext_pp_ext.uninstall().missing


def test_a_linen_factory_that_is_gone_is_missing_and_nothing_else_changes(disconnected, monkeypatch):
  from maxtext.layers import pipeline

  monkeypatch.delattr(pipeline, "create_pipeline")
  report = maxtext_pp_ext.install()
  assert len(report.missing) == 1 and not hasattr(pipeline, "create_pipeline")
  maxtext_pp_ext.uninstall()


def test_a_patch_point_that_fails_while_it_is_applied_takes_the_others_with_it(disconnected, monkeypatch):
  class Broken(table.Part):

    def apply(self, module, rebinding):
      rebinding.replace(module, "NNXDecoder.__call__", lambda own, *args: None)
      raise OSError("disk full")

  broken = Broken(name="this test", checks=(), replaced={}, required=True)
  monkeypatch.setitem(table.PATCH_POINTS, "maxtext.layers.nnx_decoders", (broken,))
  before = _bound_names()
  with pytest.raises(OSError, match="disk full"):
    maxtext_pp_ext.install()
  after = _bound_names()
  assert all(after[name] == value for name, value in before.items())
  assert not install.status().hooked and install.status().touched == ()


def test_uninstalling_refuses_to_undo_what_somebody_else_has_put_on_top(disconnected, monkeypatch):
  from maxtext.layers import pipeline

  maxtext_pp_ext.install()
  ours = pipeline.create_nnx_pipeline
  pipeline.create_nnx_pipeline = lambda *args, **kwargs: ours(*args, **kwargs)
  with pytest.raises(RuntimeError, match="maxtext.layers.pipeline.create_nnx_pipeline was replaced by other code"):
    maxtext_pp_ext.uninstall()
  assert install.status().hooked and install.status().touched
  pipeline.create_nnx_pipeline = ours
  assert maxtext_pp_ext.uninstall().changed


def test_installing_from_many_threads_applies_each_patch_point_once(disconnected):
  barrier, reports = threading.Barrier(8), []

  def work():
    barrier.wait()
    reports.append(maxtext_pp_ext.install())

  threads = [threading.Thread(target=work) for _ in range(8)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert sum(report.changed for report in reports) == 1
  assert sum(isinstance(finder, startup.PatchPointFinder) for finder in sys.meta_path) == 1
  from maxtext.layers import pipeline

  assert pipeline.create_nnx_pipeline.__wrapped__.__module__ == "maxtext.layers.pipeline"
  assert not hasattr(pipeline.create_nnx_pipeline.__wrapped__, "__wrapped__")


def test_a_report_says_in_words_what_is_connected(disconnected):
  assert "not connected" in str(install.status())
  text = str(maxtext_pp_ext.install())
  assert "connected with MaxText" in text and "touched: maxtext.layers.pipeline.create_pipeline" in text


def test_installing_before_maxtext_is_imported_reaches_the_same_places_and_survives_a_reload(run_python):
  code = """
import maxtext_pp_ext
report = maxtext_pp_ext.install()
assert not report.touched and len(report.pending) == 7, report
from maxtext.configs import pyconfig
report = maxtext_pp_ext.install()
assert not report.changed and len(report.pending) == 5, report
from maxtext.common import checkpointing
from maxtext.layers import nnx_decoders
from maxtext.utils import model_creation_utils
print("\\n".join(maxtext_pp_ext.install().touched))

# A module that is reloaded gets its patch point again, and those that bound the older objects keep theirs.
import importlib
from maxtext.configs import types
from maxtext.layers import pipeline
importlib.reload(pipeline)
assert hasattr(pipeline.create_nnx_pipeline, "__wrapped__") and hasattr(nnx_decoders.create_nnx_pipeline, "__wrapped__")

maxtext_pp_ext.uninstall()
assert "pipeline_impl" not in types.MaxTextConfig.model_fields
assert pyconfig.initialize.__defaults__[1] is types.MaxTextConfig
for function in (pipeline.create_nnx_pipeline, nnx_decoders.create_nnx_pipeline, nnx_decoders.NNXDecoder.__call__):
  assert not hasattr(function, "__wrapped__"), function
"""
  done = run_python("-c", code)
  assert set(done.stdout.splitlines()) >= TOUCHED


def test_a_swap_reaches_names_and_defaults_in_maxtext_only(monkeypatch):
  old, new = type("Old", (), {}), type("New", (), {})
  home = types.ModuleType("maxtext.home")
  other = types.ModuleType("maxtext.other")
  outside = types.ModuleType("outside")
  home.thing = other.imported = outside.imported = old

  def function(a, b=old, c=3):
    return a, b, c

  other.function = function
  for module in (home, other, outside):
    monkeypatch.setitem(sys.modules, module.__name__, module)
  rebinding = rebind.Rebinding()
  rebinding.replace(home, "thing", lambda own: new)
  assert home.thing is new and other.imported is new and function(1) == (1, new, 3) and outside.imported is old
  assert rebinding.touched[:2] == ("maxtext.home.thing", "maxtext.other.imported")
  other.later = new  # imported by name after the swap
  rebinding.undo()
  assert home.thing is old and other.imported is old and other.later is old and function(1) == (1, old, 3)

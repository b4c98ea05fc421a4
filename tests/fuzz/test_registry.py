# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Plug-ins of every bad kind: one error that names the package, from the registry and from a command."""

import sys

from hypothesis import given, settings
from hypothesis import strategies as st
import pytest

from maxtext_pp_ext import registry
from tests.fuzz.common import REFUSED, run, within
from tests.host.common import write_package
from tests.test_registry import GOOD_PIPELINE

CLASS = GOOD_PIPELINE.replace("GoodPipeline", "Pipeline")
# name: source of a module whose `Pipeline` the entry point names.
MODULES = {
    "raises on import": "raise RuntimeError('no')",
    "raises an error of its own": "class Own(Exception): pass\nraise Own",
    "ends the process on import": "raise SystemExit(0)",
    "ends the process with sys.exit": "import sys; sys.exit('bye')",
    "does not parse": "def",
    "has null bytes": "x = '\\0'\0",
    "imports what is not installed": "import no_such_module_at_all",
    "imports itself forever": "import importlib, plugin; importlib.reload(plugin)",
    "recurses": "def f(): f()\nf()",
    "has no such name": "Other = 1",
    "raises when asked for the name": "def __getattr__(name): raise ValueError(name)",
    "is None": "Pipeline = None",
    "is a number": "Pipeline = 3",
    "is a string": "Pipeline = 'maxtext_pp_ext.pipelines.circular:CircularPipeline'",
    "is a function": "def Pipeline(*args, **kwargs): return None",
    "is an instance": f"{CLASS}\nPipeline = object.__new__(Pipeline)",
    "is a module": "import json as Pipeline",
    "is a class of something else": "class Pipeline: pass",
    "is a Linen module": "from flax import linen\nclass Pipeline(linen.Module): pass",
    "is a generic alias": "Pipeline = list[int]",
    "has no call": CLASS.replace("def __call__", "def call"),
    "has a call that is no method": CLASS.replace("def __call__", "__call__ = 3\n  def call"),
    "has no get_weight_sharding": CLASS.replace("def get_weight_sharding", "def other"),
    "takes other arguments": CLASS.replace("stage_factory, mesh", "layers, mesh"),
    "takes none": f"{CLASS}\nPipeline.__init__ = lambda self: None",
    "has a constructor that is no function": f"{CLASS}\nPipeline.__init__ = 3",
    "has a constructor that lies about itself": f"{CLASS}\nPipeline.__init__.__signature__ = 'none'",
}
# What an entry point may say.
VALUES = {
    "no object": "plugin",
    "no module": ":Pipeline",
    "nothing": "",
    "a path": "plugin/Pipeline.py",
    "several colons": "plugin:Pipeline:again",
    "a relative module": ".plugin:Pipeline",
    "a call": "plugin:Pipeline()",
    "code": "__import__('os').system('true')",
    "unicode": "plügin:Pipelíne",
    "a module that is a number": "3:4",
}
NAMES = (
    "host",
    "circular",
    "circular_bsw",
    "none",
    "None",
    "null",
    "true",
    "host-bsw",
    "1e3",
    "7",
    "",
    "a b",
    "ü",
    "-x",
    "a/b",
)


@pytest.fixture(name="install")
def _install(tmp_path, monkeypatch):
  monkeypatch.syspath_prepend(tmp_path)
  registry.reset()
  yield lambda source, points, name="plugin": write_package(
      tmp_path, name, source, {registry.ENTRY_POINT_GROUP: points} if points else None
  )
  registry.reset()
  for name in ("plugin", "second"):
    sys.modules.pop(name, None)


def refused(call):
  """The one error of a bad plug-in."""
  with within(60), pytest.raises(registry.PluginError) as error:
    call()
  return str(error.value)


@pytest.mark.parametrize("source", MODULES.values(), ids=MODULES.keys())
def test_a_module_of_any_kind_is_refused_by_its_package_and_harms_no_other(install, tried, source):
  install(source, {"bad": "plugin:Pipeline"})
  assert registry.get("circular").load().__name__ == "CircularPipeline"
  text = refused(registry.get("bad").load)
  assert "plugin 1.2" in text and "bad = plugin:Pipeline" in text
  assert text == refused(registry.get("bad").load)  # the same the next time
  tried("refused")


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES.keys())
def test_an_entry_point_that_names_nothing_is_refused(install, tried, value):
  install(CLASS, {"bad": value})
  try:
    text = refused(lambda: registry.get("bad").load())
  except registry.UnknownImplementationError:  # an entry point that Python leaves out
    tried("left out")
  else:
    assert "plugin 1.2" in text
    tried("refused")


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_is_taken_or_that_a_config_cannot_hold_is_refused(install, tried, name):
  install(CLASS, {name: "plugin:Pipeline"})
  if name:
    assert "plugin 1.2" in refused(registry.names)
    tried("refused")
  else:
    assert "plugin 1.2" in refused(registry.names) or "" not in registry.names()
    tried("refused")


@settings(max_examples=60)
@given(name=st.text(min_size=1, max_size=12))
def test_any_name_is_one_that_a_config_can_hold_or_is_refused(name):
  import omegaconf

  refused_name = not registry._NAME.fullmatch(name) or registry._NO_NAME.fullmatch(name)
  if not refused_name:
    assert omegaconf.OmegaConf.from_cli([f"pipeline_impl={name}"]).pipeline_impl == name


@pytest.mark.parametrize(
    "name", ["nan", "infinity", "1_000", "0x1", "e1", "a.b", "x-y", "_", "None", "On", "yes", "y", "Inf"]
)
def test_names_that_look_like_something_else_are_refused(tried, name):
  test_any_name_is_one_that_a_config_can_hold_or_is_refused.hypothesis.inner_test(name)
  tried("judged")


FILES = {
    "no equals sign": b"[maxtext_pp_ext.pipelines]\nbad\n",
    "no section": b"bad = plugin:Pipeline\n",
    "a section that does not end": b"[maxtext_pp_ext.pipelines\nbad = plugin:Pipeline\n",
    "no text": b"\xff\xfe\x00[maxtext_pp_ext.pipelines]\nbad = plugin:Pipeline\n",
    "zeros": b"\0" * 64,
}


@pytest.mark.parametrize("content", FILES.values(), ids=FILES.keys())
def test_a_damaged_entry_points_file_is_refused_or_left_out(install, tmp_path, tried, content):
  install(CLASS, {"bad": "plugin:Pipeline"})
  (tmp_path / "plugin-1.2.dist-info" / "entry_points.txt").write_bytes(content)
  try:
    with within(60):
      assert registry.names()[:4] == ("host", "circular", "circular_bsw", "circular_ag_once")
    tried("left out")
  except registry.PluginError as error:
    assert str(error)
    tried("refused")


def test_commands_end_with_the_error_and_2(install, capfd, tried):
  from maxtext_pp_ext import cli

  install(CLASS, {"circular": "plugin:Pipeline"})
  arguments = ("ici_pipeline_parallelism=2", "pipeline_impl=circular", "base_num_decoder_layers=4")
  for command in (["check"], ["sharding"], ["compare", "--impl", "circular"], ["plan", "--devices", "4"]):
    assert cli.main([*command, *arguments]) == 2
    said = capfd.readouterr()
    assert said.out == "" and said.err.splitlines()[-1].startswith("maxtext-pp: The entry point 'circular = plugin")
    assert "Traceback" not in said.err
    tried("refused")


@pytest.mark.parametrize("kind", ["ends the process on import", "recurses", "is a class of something else"])
def test_a_command_that_is_asked_for_a_bad_module_ends_with_the_error_and_2(
    install, capfd, monkeypatch, tmp_path, tried, kind
):
  install(MODULES[kind], {"bad": "plugin:Pipeline"})
  (tmp_path / "empty").mkdir()
  monkeypatch.chdir(tmp_path / "empty")
  arguments = ["check", "pipeline_impl=bad", "ici_pipeline_parallelism=2", "base_num_decoder_layers=4"]
  outcome, said = run(capfd, tmp_path / "empty", arguments)
  assert outcome == REFUSED and said.count("The entry point 'bad = plugin:Pipeline'") == 1, said
  assert len([line for line in said.splitlines() if line.startswith(("maxtext-pp: ", "error: "))]) == 1
  tried(outcome)

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of `maxtext_pp_ext.testing.plugin`: each runs pytest in a separate process on a small project."""

import configparser
import pathlib

import pytest

from maxtext_pp_ext import testing

pytest_plugins = ["pytester"]

PLUGIN = "maxtext_pp_ext.testing.plugin"
REPOSITORY = pathlib.Path(__file__).parents[2]
ENVIRONMENT_OF_THE_PLUGIN = ("XLA_FLAGS", "JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES", "DECOUPLE_GCLOUD", "MAXTEXT_PP_EXT")

# What MaxText's own conftest does with the mark and, where it sees a GPU, with the backend; its tests in small.
CONFTEST = """
import jax
import pytest

jax.devices()

def pytest_configure(config):
  config.addinivalue_line("markers", "tpu_only: needs a TPU")

@pytest.fixture(autouse=True)
def handle_tpu_only(request):
  if request.node.get_closest_marker("tpu_only") and jax.devices()[0].platform != "tpu":
    pytest.skip("no TPU")
"""
MAXTEXT_TESTS = """
import os
import unittest

import jax
from maxtext.configs import pyconfig
from maxtext.utils.globals import MAXTEXT_CONFIGS_DIR
import pytest

pytestmark = [pytest.mark.tpu_only]

def config(**keys):
  return pyconfig.initialize(
      ["", os.path.join(MAXTEXT_CONFIGS_DIR, "decoupled_base_test.yml")],
      run_name="plugin", enable_checkpointing=False, per_device_batch_size=4, base_num_decoder_layers=8, **keys)

class PipelineTest(unittest.TestCase):
  def test_devices(self):
    self.assertEqual([d.platform for d in jax.devices()], ["cpu"] * 4)

  def test_pipelined(self):
    self.assertEqual(config(ici_pipeline_parallelism=4).pipeline_impl, "circular_bsw")

  def test_no_pipeline(self):
    self.assertEqual(config().pipeline_impl, "host")

  def test_explicit(self):
    chosen = config(ici_pipeline_parallelism=4, pipeline_impl="host", pipeline_fsdp_ag_per_repeat=True)
    self.assertEqual((chosen.pipeline_impl, chosen.pipeline_fsdp_ag_per_repeat), ("host", True))

  def test_host_mode(self):
    chosen = config(ici_pipeline_parallelism=4, pipeline_fsdp_ag_once=True)
    self.assertEqual((chosen.pipeline_impl, chosen.pipeline_fsdp_ag_once), ("circular_bsw", False))
"""


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch):
  """The child processes import this package, find no other plugin, and inherit nothing that the plugin itself sets."""
  monkeypatch.setenv("PYTHONPATH", str(pathlib.Path(testing.__file__).parents[2]))
  monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
  for name in ENVIRONMENT_OF_THE_PLUGIN:
    monkeypatch.delenv(name, raising=False)


def test_without_its_options_the_plugin_imports_and_changes_nothing(pytester):
  pytester.makepyfile(f"""
      import os, sys

      def test_inert():
        assert "{PLUGIN}" in sys.modules
        assert not [m for m in ("jax", "maxtext", "maxtext_pp_ext.registry") if m in sys.modules]
        assert not [name for name in {ENVIRONMENT_OF_THE_PLUGIN} if name in os.environ]
  """)
  result = pytester.runpytest_subprocess("-p", PLUGIN)
  result.assert_outcomes(passed=1)
  result.stdout.no_fnmatch_line("*maxtext_pp_ext*")


def test_maxtext_tests_run_on_virtual_devices_with_the_implementation_where_there_is_a_pipeline(pytester):
  pytester.makeconftest(CONFTEST)
  pytester.makepyfile(MAXTEXT_TESTS)
  result = pytester.runpytest_subprocess("-p", PLUGIN, "--pipeline-impl", "circular_bsw", "--virtual-devices", "4")
  result.assert_outcomes(passed=5)
  result.stdout.fnmatch_lines(
      [
          "maxtext_pp_ext *: pipeline_impl=circular_bsw, MaxText *, 4 virtual CPU devices",
          "the mark tpu_only was lifted from 5 tests",
          "2 tests built a config with a pipeline and got pipeline_impl=circular_bsw",
          "1 test chose pipeline_impl=host themselves",
          "pipeline_fsdp_ag_once=True, * was turned off for 1 test:",
          "  *::test_host_mode",
      ]
  )


def test_an_unknown_implementation_is_a_usage_error_that_lists_the_known_ones(pytester):
  result = pytester.runpytest_subprocess("-p", PLUGIN, "--pipeline-impl", "circular_bws")
  assert result.ret == pytest.ExitCode.USAGE_ERROR
  result.stderr.fnmatch_lines(["*circular_bws*"])
  for name in ("host", "circular", "circular_bsw", "circular_ag_once"):
    result.stderr.fnmatch_lines([f"*{name}*"])


def test_all_configs_without_an_implementation_is_a_usage_error(pytester):
  result = pytester.runpytest_subprocess("-p", PLUGIN, "--all-configs")
  assert result.ret == pytest.ExitCode.USAGE_ERROR
  result.stderr.fnmatch_lines(["*--all-configs needs --pipeline-impl NAME*"])


@pytest.mark.parametrize(
    "count, platforms, message", [("0", "cpu", "*at least 1, got 0*"), ("4", "tpu", "*JAX_PLATFORMS=tpu*")]
)
def test_virtual_devices_that_cannot_be_are_usage_errors(pytester, monkeypatch, count, platforms, message):
  monkeypatch.setenv("JAX_PLATFORMS", platforms)
  result = pytester.runpytest_subprocess("-p", PLUGIN, "--virtual-devices", count)
  assert result.ret == pytest.ExitCode.USAGE_ERROR
  result.stderr.fnmatch_lines([message])


def test_a_backend_that_exists_already_is_a_usage_error_unless_it_has_the_devices(pytester, monkeypatch):
  pytester.makepyfile(early="import jax\njax.devices()")
  pytester.makepyfile("import jax\ndef test_devices(): assert jax.device_count() == 4")
  monkeypatch.setenv("JAX_PLATFORMS", "cpu")
  arguments = ("-p", "early", "-p", PLUGIN, "--virtual-devices", "4")
  result = pytester.runpytest_subprocess(*arguments)
  assert result.ret == pytest.ExitCode.USAGE_ERROR
  result.stderr.fnmatch_lines(["*comes too late*XLA_FLAGS=--xla_force_host_platform_device_count=4*"])
  monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
  pytester.runpytest_subprocess(*arguments).assert_outcomes(passed=1)


def test_other_flags_of_the_environment_are_kept_and_another_device_count_is_replaced(pytester, monkeypatch):
  monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8 --xla_cpu_enable_fast_math=false")
  pytester.makepyfile("""
      import os, jax

      def test_flags():
        assert os.environ["XLA_FLAGS"].split() == [
            "--xla_cpu_collective_call_terminate_timeout_seconds=600",
            "--xla_cpu_enable_fast_math=false",
            "--xla_force_host_platform_device_count=3"]
        assert jax.device_count() == 3
  """)
  pytester.runpytest_subprocess("-p", PLUGIN, "--virtual-devices", "3").assert_outcomes(passed=1)


def test_a_conftest_can_load_the_plugin(pytester):
  pytester.makeconftest(f"pytest_plugins = ['{PLUGIN}']")
  pytester.makepyfile("import jax\ndef test_devices(): assert jax.device_count() == 2")
  result = pytester.runpytest_subprocess("--virtual-devices=2")
  result.assert_outcomes(passed=1)
  result.stdout.fnmatch_lines(["*2 virtual CPU devices"])


def test_the_registered_plugin_can_also_be_named_with_p(pytester, monkeypatch):
  setup = configparser.ConfigParser()
  setup.read(REPOSITORY / "setup.cfg")
  # As if the wheel were installed: pytest loads the entry point, and must not register the module twice.
  installed = pytester.mkdir("installed") / "maxtext_pp_ext_as_installed-0.dist-info"
  installed.mkdir()
  (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: maxtext-pp-ext-as-installed\nVersion: 0\n")
  (installed / "entry_points.txt").write_text("[pytest11]\n" + setup["options.entry_points"]["pytest11"])
  monkeypatch.setenv("PYTHONPATH", str(installed.parent), prepend=":")
  monkeypatch.delenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD")
  pytester.makepyfile("def test_nothing(): pass")
  for named in ((), ("-p", PLUGIN)):
    result = pytester.runpytest_subprocess(*named, "--virtual-devices", "2")
    result.assert_outcomes(passed=1)
    assert str(result.stdout).count("2 virtual CPU devices") == 1

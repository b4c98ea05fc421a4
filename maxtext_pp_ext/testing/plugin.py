# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin that runs tests written for MaxText, upstream's own among them, with this extension.

  pytest -p maxtext_pp_ext.testing.plugin --pipeline-impl circular_bsw --virtual-devices 4 MAXTEXT/tests/...

`--pipeline-impl NAME` installs the patch points, and sets `pipeline_impl=NAME` in every config that has a pipeline and
names no implementation. In tests of the host's own modes it turns the two keys `pipeline_fsdp_ag_once` and
`pipeline_fsdp_ag_per_repeat` off; the terminal summary lists these tests. Configs without a pipeline stay unchanged. With
`--all-configs`, those with `scan_layers` get the implementation, too: a window slides over their layers (docs/window.md).

`--virtual-devices N` replaces TPUs by N CPU devices. Before anything can initialise JAX, it sets XLA_FLAGS, and
DECOUPLE_GCLOUD=TRUE and JAX_PLATFORMS=cpu unless these are set. It also removes the mark `tpu_only`, so that tests that
run on TPUs upstream run here. A test that really needs a TPU then fails.

Each option works without the other. The plugin is loaded into every pytest run of an environment, so it imports nothing
outside pytest and the standard library before an option needs it.
"""

from collections import defaultdict
from collections.abc import Iterator
import contextlib
import os
import sys
from typing import Any

import pytest

import maxtext_pp_ext
from maxtext_pp_ext import installed, processes
from maxtext_pp_ext.units import counted

TPU_ONLY = "tpu_only"
# Keys of the properties that record in a test's reports how its configs were changed (also from xdist's workers).
_IMPL_PROPERTY = "maxtext_pp_ext.pipeline_impl"
_EXPLICIT_PROPERTY = "maxtext_pp_ext.explicit_pipeline_impl"
_SWITCHED_OFF_PROPERTY = "maxtext_pp_ext.switched_off"
_LIFTED_PROPERTY = "maxtext_pp_ext.lifted"

_prepared = pytest.StashKey[bool]()


def pytest_addoption(parser: pytest.Parser) -> None:
  group = parser.getgroup("maxtext_pp_ext", "MaxText with the pipelines of maxtext_pp_ext")
  group.addoption(
      "--pipeline-impl",
      metavar="NAME",
      help="give this pipeline_impl to every MaxText config that has a pipeline and names no implementation itself",
  )
  group.addoption(
      "--all-configs",
      action="store_true",
      default=None,
      help="with --pipeline-impl: configs without a pipeline get it, too, if they scan over layers",
  )
  group.addoption(
      "--virtual-devices",
      metavar="N",
      type=int,
      help="run on N virtual CPU devices, and run tests marked tpu_only on them",
  )


# Runs before other hooks of this name, because conftest files, such as MaxText's own, import jax, and some initialise it.
@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
  _prepare(early_config)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
  # A conftest's `pytest_plugins` loads this module too late for the hook above.
  _prepare(config)
  if _option(config, "pipeline_impl") is not None or _option(config, "virtual_devices") is not None:
    config.pluginmanager.register(_Session(config), "maxtext_pp_ext.testing.session")


def _option(config: pytest.Config, name: str):
  # `config.option` is filled after the first conftests are loaded; before, there are only the known arguments.
  value = getattr(config.option, name, None)
  return getattr(config.known_args_namespace, name, None) if value is None else value


def _prepare(config: pytest.Config) -> None:
  """Applies the options, once, before a test module can import MaxText."""
  if config.stash.get(_prepared, False):
    return
  config.stash[_prepared] = True
  count, name = _option(config, "virtual_devices"), _option(config, "pipeline_impl")
  if count is not None:
    _use_virtual_devices(count)
  if name is not None:
    _install(name)
  elif _option(config, "all_configs"):
    raise pytest.UsageError("--all-configs needs --pipeline-impl NAME: the implementation that all configs get")


def _use_virtual_devices(count: int) -> None:
  if count < 1:
    raise pytest.UsageError(f"--virtual-devices must be at least 1, got {count}")
  platforms = os.environ.setdefault("JAX_PLATFORMS", "cpu")
  if platforms.split(",")[0] != "cpu":
    raise pytest.UsageError(
        f"--virtual-devices {count} needs CPU devices, but JAX_PLATFORMS={platforms}: unset it, set it to cpu, "
        "or leave out --virtual-devices to run on real devices"
    )
  os.environ.setdefault("DECOUPLE_GCLOUD", "TRUE")
  flag = f"{processes.DEVICE_COUNT_FLAG}={count}"
  flags = os.environ.get("XLA_FLAGS", "").split()
  if [word for word in flags if word.split("=")[0] == processes.DEVICE_COUNT_FLAG] != [flag]:
    from maxtext_pp_ext import jax_private  # pylint: disable=import-outside-toplevel

    if "jax" in sys.modules and jax_private.backends_are_initialized():
      raise pytest.UsageError(
          f"--virtual-devices {count} comes too late: JAX's backend was initialised before pytest loaded its first "
          "conftest, and its devices cannot change after that. Find the module that calls jax.devices() or computes that "
          f"early (another plugin, or -p), or start pytest with XLA_FLAGS={flag} in the environment"
      )
    os.environ["XLA_FLAGS"] = processes.xla_flags(count)
  if "JAX_NUM_CPU_DEVICES" in os.environ:
    os.environ["JAX_NUM_CPU_DEVICES"] = str(count)  # overrides XLA_FLAGS
  if (jax := sys.modules.get("jax")) is not None and not jax.config.jax_platforms:
    jax.config.update("jax_platforms", platforms)  # JAX reads JAX_PLATFORMS only when it is imported


def _install(name: str) -> None:
  from maxtext_pp_ext import registry  # pylint: disable=import-outside-toplevel
  from maxtext_pp_ext.host.patch_points import version  # pylint: disable=import-outside-toplevel

  try:
    registry.get(name)
    # The wheel's start-up hook has normally done this, except without the hook or with MAXTEXT_PP_EXT=off.
    maxtext_pp_ext.install()
  except (registry.UnknownImplementationError, registry.PluginError, version.HostVersionError) as error:
    raise pytest.UsageError(f"--pipeline-impl: {error}") from error


class _Session:
  """The hooks of an active plugin during one pytest run."""

  def __init__(self, config: pytest.Config) -> None:
    self.pipeline_impl: str | None = _option(config, "pipeline_impl")
    self.virtual_devices: int | None = _option(config, "virtual_devices")
    self.item: pytest.Item | None = None
    self.properties: dict[tuple[str, Any], set[str]] = defaultdict(set)  # (key, value) -> node ids
    if self.pipeline_impl is not None:
      from maxtext_pp_ext.host.replacements import defaults  # pylint: disable=import-outside-toplevel

      all_configs = bool(_option(config, "all_configs"))
      stack = contextlib.ExitStack()
      stack.enter_context(defaults.override_pipeline_impl(self.pipeline_impl, self._on_config, all_configs=all_configs))
      config.add_cleanup(stack.close)

  def pytest_report_header(self) -> str:
    devices = f"{self.virtual_devices} virtual CPU devices" if self.virtual_devices else "devices as JAX finds them"
    impl = f"pipeline_impl={self.pipeline_impl}" if self.pipeline_impl else "pipelines untouched"
    version = installed.version("maxtext") or "of unknown version"  # run from a source tree
    return f"maxtext_pp_ext {maxtext_pp_ext.__version__}: {impl}, MaxText {version}, {devices}"

  # Runs last, so that `-m tpu_only` still selects tests, and a conftest that sorts tests by mark still sees the mark.
  @pytest.hookimpl(trylast=True)
  def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
    if self.virtual_devices is None:
      return
    marked = [item for item in items if item.get_closest_marker(TPU_ONLY) is not None]
    for item in marked:
      item.user_properties.append((_LIFTED_PROPERTY, TPU_ONLY))
    # The test, its class or its module may have the mark.
    for node in {node for item in marked for node in item.listchain()}:
      node.own_markers[:] = [mark for mark in node.own_markers if mark.name != TPU_ONLY]

  @pytest.hookimpl(wrapper=True)
  def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
    self.item = item
    try:
      return (yield)
    finally:
      self.item = None

  def _on_config(self, report) -> None:
    """Records in the running test the decision of `maxtext_pp_ext.host.replacements.defaults` for one of its configs."""
    key = _EXPLICIT_PROPERTY if report.explicit else _IMPL_PROPERTY
    properties = [(key, report.pipeline_impl), *((_SWITCHED_OFF_PROPERTY, host_key) for host_key in report.switched_off)]
    if self.item is not None:
      self.item.user_properties.extend(p for p in properties if p not in self.item.user_properties)
    else:
      for each in properties:
        self.properties[each].add("(module level)")  # while test modules are imported no test is running

  def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
    for key, value in report.user_properties:
      if isinstance(key, str) and key.startswith("maxtext_pp_ext."):
        self.properties[key, value].add(report.nodeid)

  def pytest_terminal_summary(self, terminalreporter) -> None:
    terminalreporter.section("maxtext_pp_ext")
    texts = {
        _LIFTED_PROPERTY: "the mark {value} was lifted from {tests}",
        _IMPL_PROPERTY: "{tests} built a config with a pipeline and got pipeline_impl={value}",
        _EXPLICIT_PROPERTY: "{tests} chose pipeline_impl={value} themselves",
        _SWITCHED_OFF_PROPERTY: "{value}=True, a mode of MaxText's own pipelines, was turned off for {tests}:",
    }
    for kind, text in texts.items():
      for value, tests in sorted((value, tests) for (key, value), tests in self.properties.items() if key == kind):
        terminalreporter.line(text.format(value=value, tests=counted(len(tests), "test")))
        for test in sorted(tests) if kind == _SWITCHED_OFF_PROPERTY else ():
          terminalreporter.line(f"  {test}")
    if self.pipeline_impl is not None and all(key != _IMPL_PROPERTY for key, _ in self.properties):
      terminalreporter.line(f"no config in this run got pipeline_impl={self.pipeline_impl}")

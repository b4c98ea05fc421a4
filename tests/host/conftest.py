# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests of the patch points: fresh interpreters, and patch points that are applied during a test."""

import os
import subprocess
import sys

import pytest

from tests.host.common import FAKE_PIPELINE, ROOT, TINY, write_package


@pytest.fixture
def fake_package(tmp_path):
  """A folder with an installed package that adds `pipeline_impl=fake`."""
  folder = tmp_path / "site"
  folder.mkdir()
  points = {"maxtext_pp_ext.pipelines": {"fake": "fake_pipeline:FakePipeline"}}
  write_package(folder, "fake_pipeline", FAKE_PIPELINE, points)
  return folder


@pytest.fixture
def run_python(tmp_path):
  """Runs code or arguments in a fresh interpreter, with this checkout on its path; returns the completed process.

  The start-up hook is off, whether or not this environment has it, unless the code contains `HOOK`.
  """

  def run(*arguments, path=(), devices=2, timeout=300, check=True, env=()):
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, [*path, ROOT])),
        "MAXTEXT_PP_EXT": "off",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0",
        **dict(env),
    }
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment,
        cwd=tmp_path,
        check=False,
    )
    if check and done.returncode:
      raise AssertionError(f"exit status {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}")
    return done

  return run


@pytest.fixture
def installed():
  """Applies the patch points in this process during a test, and undoes them afterwards."""
  from maxtext_pp_ext.host.patch_points import install

  before = install.status()
  install.install()
  yield install
  if before.hooked:
    install.install()
  else:
    install.uninstall()


@pytest.fixture
def make_config(installed):
  """Makes a small config through pyconfig; `rows` is the size of the whole batch, for any number of devices."""
  import jax
  from maxtext.configs import pyconfig

  def make(config_class=None, rows=8, **overrides):
    keys = dict(item.split("=", 1) for item in TINY) | {"per_device_batch_size": rows / len(jax.devices())} | overrides
    keys = {key: value for key, value in keys.items() if value is not None}
    more = {} if config_class is None else {"config_class": config_class}
    return pyconfig.initialize(["", *(f"{key}={value}" for key, value in keys.items())], **more)

  return make

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The machine that tests run on: 8 virtual CPU devices, no Google Cloud, compiled programs kept between runs.

The settings are environment variables, set before anything imports JAX, so that processes that tests start have them,
too. A caller's own settings win.

Each run with the same version of Hypothesis draws the same examples. Hypothesis has no time limit.
"""

from collections.abc import Iterator
import functools
import gc
import os
import pathlib
import sys

import hypothesis
import omegaconf
import pytest

from maxtext_pp_ext import processes

VIRTUAL_DEVICES = 8
_LONG = {"trainer", "trial", "parity", "host"}  # folders of tests that train, or import MaxText in processes of their own

if "jax" in sys.modules:
  raise RuntimeError(
      "JAX was imported before tests/conftest.py could set its devices: a pytest plugin or PYTHONSTARTUP imports it. "
      "Switch that plugin off with -p no:NAME."
  )

_cache = pathlib.Path(__file__).resolve().parent.parent / ".cache" / "jax"

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("DECOUPLE_GCLOUD", "TRUE")
if processes.DEVICE_COUNT_FLAG not in os.environ.get("XLA_FLAGS", ""):
  os.environ["XLA_FLAGS"] = processes.xla_flags(VIRTUAL_DEVICES)
# Most of the time of our tests is LLVM's, and without its optimizations it is 40 % less.
if "--xla_backend_optimization_level" not in os.environ["XLA_FLAGS"]:
  os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=0"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(_cache))
# The default is 1 s: most of our programs are smaller, and there are many.
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
# MaxText sets its own cache folder, ~/jax_cache, for every config; its own way to say otherwise is M_ and the key.
os.environ.setdefault("M_JAX_CACHE_DIR", os.environ["JAX_COMPILATION_CACHE_DIR"])

hypothesis.settings.register_profile("same", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("same")


@functools.cache
def _read(path: str, *_: int) -> object:
  read = _load(path)
  omegaconf.OmegaConf.set_readonly(read, True)
  return read


def _load_once(file_: object) -> object:
  """Reads a yml file once. MaxText reads base.yml for each config, in 0.15 s of 0.4, and deletes keys of what it gets."""
  if not isinstance(file_, str | os.PathLike):
    return _load(file_)
  path = os.path.abspath(file_)
  stat = os.stat(path)
  read = _read(path, stat.st_mtime_ns, stat.st_size)
  if not isinstance(read, omegaconf.DictConfig):
    return _load(path)
  copy = omegaconf.DictConfig({})
  copy.__dict__["_content"] = dict(read.__dict__["_content"])
  return copy


_load, omegaconf.OmegaConf.load = omegaconf.OmegaConf.load, _load_once


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
  """Begins with files that take long, so that at the end no worker waits for another one."""
  items.sort(key=lambda item: not _LONG.intersection(item.path.parts))


def pytest_collection_finish() -> None:
  """Lets Python's collector work seldom, and not on what was imported: it took a seventh of the time of our tests."""
  gc.collect()
  gc.freeze()
  gc.set_threshold(100_000, 20, 50)


@pytest.fixture(autouse=True)
def prng() -> Iterator[None]:
  """Gives each test JAX's own random numbers: MaxText's trainers set others, for the process that they run in."""
  import jax  # pylint: disable=import-outside-toplevel

  yield
  jax.config.update("jax_default_prng_impl", "threefry2x32")

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Looks at an environment: what is installed beside this package, whether it is connected, and what to do about it."""

from collections.abc import Callable, Iterator
import dataclasses
import importlib
import importlib.metadata
import os
import platform
import sys
from typing import Any

import maxtext_pp_ext
from maxtext_pp_ext import installed, registry
from maxtext_pp_ext.errors import SetupError
from maxtext_pp_ext.host import activate, startup

FINE, NOTE, WRONG = "ok", "note", "wrong"
_OURS = "maxtext-pp-ext"
# What a run's values and speed depend on, beside the packages that ours requires.
_PACKAGES = ("jaxlib", "libtpu", "orbax-checkpoint", "qwix", "aqtp", "tokamax", "numpy")
# Variables that change what a run does. Of JAX, all that begin so.
_VARIABLES = {
    "MAXTEXT_PP_EXT": "switches the start-up hook",
    "DECOUPLE_GCLOUD": "MaxText without Google Cloud",
    "XLA_FLAGS": "flags of the compiler; MaxText adds compile_xla_flags only where it compiles ahead of time",
    "LIBTPU_INIT_ARGS": "flags of the TPU runtime and its compiler",
    "PYTHONPATH": "packages from here come before the installed ones",
}
_BEGINNINGS = ("JAX_", "M_", "TPU_", "MEGASCALE_")


@dataclasses.dataclass(frozen=True)
class Finding:
  name: str
  value: str  # what was found
  state: str = FINE  # or NOTE, or WRONG: something of this package does not work
  advice: str = ""  # what to do about it
  subject: str = ""  # versions, start-up hook, patch points, implementations, environment, devices, source, imports


def findings() -> list[Finding]:
  """Returns everything that can be found without devices. Imports MaxText, and leaves our patch points applied to it."""
  environment = list(looked("environment", _environment))  # before imports add to it
  found = [*looked("versions", _versions), *looked("start-up hook", _hook), *looked("patch points", _patch_points)]
  return [*found, *looked("implementations", _implementations), *environment]


def looked(subject: str, look: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
  """The findings of a part. An error in one part does not hide the others."""
  try:
    for finding in look():
      yield dataclasses.replace(finding, subject=subject)
  except Exception as error:  # pylint: disable=broad-exception-caught  # whatever is broken in this environment
    yield Finding("not looked at", f"{type(error).__name__}: {error}", WRONG, "Repair this first.", subject)


def _versions() -> Iterator[Finding]:
  from packaging.requirements import Requirement  # pylint: disable=import-outside-toplevel

  yield Finding("Python", f"{platform.python_version()}, {sys.executable}")
  yield Finding(_OURS, f"{maxtext_pp_ext.__version__}, {maxtext_pp_ext.__path__[0]}")
  try:
    required = [Requirement(text) for text in importlib.metadata.requires(_OURS) or ()]
  except importlib.metadata.PackageNotFoundError:
    required = []
    advice = "Entry points and requirements are not known. Install it: pip install CHECKOUT"
    yield Finding(_OURS, "not installed, only on the path", NOTE, advice)
  for each in (each for each in required if each.marker is None):
    if (version := installed.version(each.name)) is None:
      yield Finding(each.name, "not installed", WRONG, f"Install it: pip install '{each}'")
    elif not each.specifier.contains(version, prereleases=True):
      yield Finding(each.name, version, WRONG, f"This package is for {each.specifier}: pip install '{each}'")
    else:
      yield Finding(each.name, f"{version} ({each.specifier})")
  for name in _PACKAGES:
    if (version := installed.version(name)) is not None:
      yield Finding(name, version)
    elif name == "libtpu":
      advice = "compare and plan --validate compile for TPUs with it: pip install libtpu"
      yield Finding(name, "not installed", NOTE, advice)


def _hook() -> Iterator[Finding]:
  path = activate.pth_path()
  advice = f"Install the package, or add it: {sys.executable} -m maxtext_pp_ext.host.activate"
  yield Finding("file", str(path)) if path.exists() else Finding("file", f"{path} is not there", NOTE, advice)
  if (setting := startup.setting()) in startup.OFF:
    advice = "pipeline_impl is an unknown key in this environment. Unset MAXTEXT_PP_EXT."
    yield Finding("MAXTEXT_PP_EXT", setting, NOTE, advice)
  elif setting not in startup.ON:
    yield Finding("MAXTEXT_PP_EXT", setting, NOTE, f"It is on. Use one of {', '.join((*startup.OFF, *startup.ON[1:]))}.")


def _patch_points() -> Iterator[Finding]:
  from maxtext_pp_ext.host.patch_points import install, table  # pylint: disable=import-outside-toplevel

  try:
    install.install()
  except SetupError as error:
    yield Finding("all", "refused", WRONG, str(error))
    return
  for name, parts in table.PATCH_POINTS.items():
    purpose = table.purpose(parts)
    try:
      importlib.import_module(name)
      yield Finding(name, f"{'in MaxText itself' if name in install.status().skipped else 'applied'}: {purpose}")
    except Exception as error:  # pylint: disable=broad-exception-caught  # MaxText's own imports may fail, too
      # A part of MaxText that this MaxText does not have, or whose packages are not installed.
      absent = isinstance(error, ModuleNotFoundError)
      value, state = ("not imported", NOTE) if absent and not parts[0].required else ("refused", WRONG)
      yield Finding(name, f"{value}: {purpose}", state, f"{error}." if absent else f"{type(error).__name__}: {error}")
  for text in install.status().missing:
    feature, _, why = text.partition(": ")
    yield Finding(feature, "missing; a run that needs it is refused", NOTE, why)


def _implementations() -> Iterator[Finding]:
  for name in registry.names():
    implementation = registry.get(name)
    try:
      if name != registry.HOST:
        implementation.load()
      yield Finding(name, implementation.summary)
    except SetupError as error:
      yield Finding(name, f"cannot be used: {implementation.summary}", WRONG, str(error))


def _environment() -> Iterator[Finding]:
  for name, value in sorted(os.environ.items()):
    if name in _VARIABLES or name.startswith(_BEGINNINGS):
      what = _VARIABLES.get(name, "a key of MaxText's config" if name.startswith("M_") else "")
      yield Finding(name, value + (f" ({what})" if what else ""))


def of_devices(machine: dict[str, Any]) -> Finding:
  """What was found of the devices of this machine (`compiled.tasks.devices`)."""
  if "failure" in machine:
    advice = "Set JAX_PLATFORMS=cpu to work without accelerators, or repair their driver."
    return Finding("JAX", str(machine["failure"]), NOTE, advice, "devices")
  kinds = ", ".join(f"{count} × {kind}" for kind, count in machine["kinds"].items())
  return Finding(machine["platform"], f"{kinds}; {machine['runtime']}", subject="devices")

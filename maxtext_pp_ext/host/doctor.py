# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Looks at an environment: what is installed beside this package, whether it is connected, and what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
import dataclasses
import importlib
import importlib.metadata
import os
import platform
import sys
from typing import Any

import maxtext_pp_ext
from maxtext_pp_ext import registry
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
  """One thing that was looked at.

  Attributes:
    subject: what it belongs to: versions, start-up hook, seams, implementations, environment.
    name: of the thing.
    value: what was found.
    state: FINE, NOTE, or WRONG: something of this package does not work.
    advice: what to do about it; "" if there is nothing to do.
  """

  subject: str
  name: str
  value: str
  state: str = FINE
  advice: str = ""


def findings() -> list[Finding]:
  """Returns everything that can be found without devices. Imports MaxText, and leaves our seams applied to it."""
  environment = _looked(_environment)  # before imports add to it
  found: list[Finding] = []
  for look in (_versions, _hook, _seams, _implementations):
    found += _looked(look)
  return found + environment


def _looked(look: Callable[[], Iterator[Finding]]) -> list[Finding]:
  """The findings of a part, of which none can keep the others from being told."""
  found = []
  try:
    for finding in look():
      found.append(finding)
  except Exception as error:  # pylint: disable=broad-exception-caught  # whatever is broken in this environment
    subject = look.__name__.strip("_").replace("_", " ")
    text = f"{type(error).__name__}: {error}"
    found.append(Finding(subject=subject, name="not looked at", value=text, state=WRONG, advice="Repair this first."))
  return found


def _versions() -> Iterator[Finding]:
  from packaging.requirements import Requirement  # pylint: disable=import-outside-toplevel

  yield Finding(subject="versions", name="Python", value=f"{platform.python_version()}, {sys.executable}")
  yield Finding(subject="versions", name=_OURS, value=f"{maxtext_pp_ext.__version__}, {maxtext_pp_ext.__path__[0]}")
  try:
    required = [Requirement(text) for text in importlib.metadata.requires(_OURS) or ()]
  except importlib.metadata.PackageNotFoundError:
    required = []
    advice = "Entry points and requirements are not known. Install it: pip install CHECKOUT"
    yield Finding(subject="versions", name=_OURS, value="not installed, only on the path", state=NOTE, advice=advice)
  needed = [each for each in required if each.marker is None]
  for each in needed:
    version = _version(each.name)
    if version is None:
      advice = f"Install it: pip install '{each}'"
      yield Finding(subject="versions", name=each.name, value="not installed", state=WRONG, advice=advice)
    elif not each.specifier.contains(version, prereleases=True):
      advice = f"This package is for {each.specifier}: pip install '{each}'"
      yield Finding(subject="versions", name=each.name, value=version, state=WRONG, advice=advice)
    else:
      yield Finding(subject="versions", name=each.name, value=f"{version} ({each.specifier})")
  for name in _PACKAGES:
    if (version := _version(name)) is not None:
      yield Finding(subject="versions", name=name, value=version)
    elif name == "libtpu":
      advice = "compare and plan --validate compile for TPUs with it: pip install libtpu"
      yield Finding(subject="versions", name=name, value="not installed", state=NOTE, advice=advice)


def _version(name: str) -> str | None:
  try:
    return importlib.metadata.version(name)
  except importlib.metadata.PackageNotFoundError:
    return None


def _hook() -> Iterator[Finding]:
  subject, path = "start-up hook", activate.pth_path()
  if path.exists():
    yield Finding(subject=subject, name="file", value=str(path))
  else:
    advice = f"Install the package, or add it: {sys.executable} -m maxtext_pp_ext.host.activate"
    yield Finding(subject=subject, name="file", value=f"{path} is not there", state=NOTE, advice=advice)
  setting = startup.setting()
  if setting in startup.OFF:
    advice = "pipeline_impl is an unknown key in this environment. Unset MAXTEXT_PP_EXT."
    yield Finding(subject=subject, name="MAXTEXT_PP_EXT", value=setting, state=NOTE, advice=advice)
  elif setting not in startup.ON:
    advice = f"It is on. Use one of {', '.join((*startup.OFF, *startup.ON[1:]))}."
    yield Finding(subject=subject, name="MAXTEXT_PP_EXT", value=setting, state=NOTE, advice=advice)


def _seams() -> Iterator[Finding]:
  from maxtext_pp_ext.host.seams import install, table  # pylint: disable=import-outside-toplevel

  try:
    install.install()
  except SetupError as error:
    yield Finding(subject="seams", name="all", value="refused", state=WRONG, advice=str(error))
    return
  for name, seam in table.SEAMS.items():
    try:
      importlib.import_module(name)
    except ModuleNotFoundError as error:
      # A part of MaxText that this MaxText does not have, or whose packages are not installed.
      state, value = (WRONG, "refused") if seam.required else (NOTE, "not imported")
      yield Finding(subject="seams", name=name, value=f"{value}: {seam.purpose}", state=state, advice=f"{error}.")
      continue
    except Exception as error:  # pylint: disable=broad-exception-caught  # MaxText's own imports may fail, too
      advice = f"{type(error).__name__}: {error}"
      yield Finding(subject="seams", name=name, value=f"refused: {seam.purpose}", state=WRONG, advice=advice)
      continue
    patched = name in install.status().stood_aside
    value = f"{'in MaxText itself' if patched else 'applied'}: {seam.purpose}"
    yield Finding(subject="seams", name=name, value=value)
  for text in install.status().missing:
    feature, _, why = text.partition(": ")
    yield Finding(subject="seams", name=feature, value="missing; a run that needs it is refused", state=NOTE, advice=why)


def _implementations() -> Iterator[Finding]:
  for name in registry.names():
    implementation = registry.get(name)
    if name != registry.HOST:
      try:
        implementation.load()
      except SetupError as error:
        value = f"cannot be used: {implementation.summary}"
        yield Finding(subject="implementations", name=name, value=value, state=WRONG, advice=str(error))
        continue
    yield Finding(subject="implementations", name=name, value=implementation.summary)


def _environment() -> Iterator[Finding]:
  for name, value in sorted(os.environ.items()):
    if name in _VARIABLES or name.startswith(_BEGINNINGS):
      what = _VARIABLES.get(name, "a key of MaxText's config" if name.startswith("M_") else "")
      yield Finding(subject="environment", name=name, value=value + (f" ({what})" if what else ""))


def of_devices(machine: dict[str, Any]) -> Finding:
  """What was found of the devices of this machine (`compiled.measured.devices.of_machine`)."""
  if "failure" in machine:
    advice = "Set JAX_PLATFORMS=cpu to work without accelerators, or repair their driver."
    return Finding(subject="devices", name="JAX", value=str(machine["failure"]), state=NOTE, advice=advice)
  kinds = ", ".join(f"{count} × {kind}" for kind, count in machine["kinds"].items())
  return Finding(subject="devices", name=machine["platform"], value=f"{kinds}; {machine['runtime']}")

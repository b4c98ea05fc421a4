# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Modules that are executed when somebody uses them, and not when somebody imports them. Standard library only.

A command asks MaxText a small question, and MaxText imports everything that training may need. `postpone` lets chosen
modules wait: an `import` of one makes an empty module, which is executed on the first access to one of its attributes.
Other than `importlib.util.LazyLoader`'s, it stays empty while its submodules are imported, which asks for its path only.
A name that another module takes out of it with `from … import` executes it. Exceptions are its `mappings`: in place of
them the other module gets a mapping that executes it when it is read. An object that has another home comes from there.
"""

from collections.abc import Iterator, Mapping
import importlib
import importlib.machinery
import sys
import threading
from types import ModuleType
from typing import Any

_lock = threading.RLock()


def postpone(modules: Mapping[str, tuple[str, ...]], homes: Mapping[str, str] | None = None) -> None:
  """Lets modules wait that are not imported yet, from now on in this process.

  Args:
    modules: full name of a module -> its `mappings`, module-level dicts that others take out of it.
    homes: full name of an object in such a module -> that under which the module itself imports it.
  """
  with _lock:
    if (finder := _finder()) is None:
      sys.meta_path.insert(0, finder := _Finder())
    finder.modules |= modules
    finder.homes |= homes or {}


class _Finder:
  """The entry of `sys.meta_path` that finds the modules as usual, and gives them another loader."""

  def __init__(self):
    self.modules: dict[str, tuple[str, ...]] = {}
    self.homes: dict[str, str] = {}
    self._searching: set[str] = set()

  def find_spec(self, name, path=None, target=None):
    if name not in self.modules or name in self._searching:
      return None
    with _lock:
      self._searching.add(name)
      try:
        spec = next(filter(None, (each.find_spec(name, path, target) for each in list(sys.meta_path))), None)
      finally:
        self._searching.discard(name)
    if spec is not None and spec.loader is not None:
      spec.loader = _Loader(spec.loader, self.modules[name])  # type: ignore[assignment]  # has what a loader has
    return spec


def _finder() -> _Finder | None:
  return next((found for found in sys.meta_path if isinstance(found, _Finder)), None)


class _Loader:
  """Loads a module by doing nothing; all else is the real loader's."""

  def __init__(self, loader, mappings: tuple[str, ...]):
    self.loader, self.mappings = loader, mappings

  def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
    return _Waiting(spec.name)

  def exec_module(self, module: ModuleType) -> None:
    module.__dict__.update({name: _Postponed(module, name) for name in self.mappings})

  def __getattr__(self, name):
    return getattr(self.loader, name)


class _Waiting(ModuleType):
  """A module that is executed on the first access to an attribute that the import system did not give it."""

  def __getattr__(self, name: str) -> Any:
    if name.startswith("__") and name.endswith("__"):
      raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
    full = f"{self.__name__}.{name}"
    finder = _finder()
    if finder and full in finder.modules:
      return importlib.import_module(full)
    if finder and full in finder.homes:
      module, _, own_name = finder.homes[full].rpartition(".")
      return getattr(importlib.import_module(module), own_name)
    execute(self)
    return getattr(self, name)


class _Replaced(ModuleType):
  """A module that put another object into `sys.modules` while it was executed, for those that imported it before."""

  def __getattr__(self, name: str) -> Any:
    return getattr(sys.modules[self.__name__], name)


def execute(module: Any) -> None:
  """Executes a module that waits; does nothing with another one."""
  with _lock:
    if not isinstance(module, _Waiting):
      return
    found: Any = module
    waiting = found.__loader__
    # From here on it is the real module, also for those that import it while it is executed.
    found.__class__ = ModuleType
    before = {name: found.__dict__.pop(name) for name in waiting.mappings}
    found.__loader__ = found.__spec__.loader = waiting.loader
    try:
      waiting.loader.exec_module(found)
    except BaseException:
      found.__class__ = _Waiting
      found.__loader__ = found.__spec__.loader = waiting
      found.__dict__.update(before)
      raise
    if sys.modules.get(found.__name__, found) is not found:
      found.__class__ = _Replaced


class _Postponed(Mapping):
  """A dict of a module that waits. It executes the module when it is read."""

  def __init__(self, module: ModuleType, name: str):
    self._module, self._name = module, name

  @property
  def _real(self) -> Mapping:
    execute(self._module)
    return self._module.__dict__[self._name]

  def __getitem__(self, key: Any) -> Any:
    return self._real[key]

  def __iter__(self) -> Iterator:
    return iter(self._real)

  def __len__(self) -> int:
    return len(self._real)

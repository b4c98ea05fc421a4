# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Connects this package with MaxText and disconnects it: all patch points or none."""

import dataclasses
import importlib
import importlib.util
import sys
import threading
from types import ModuleType

from maxtext_pp_ext.host import startup
from maxtext_pp_ext.host.patch_points import rebind, table, version

_lock = threading.RLock()
# A module that is reloaded, or removed and imported again, gets its patch point again. Names bound to older objects keep
# them.
_applied: dict[str, list[rebind.Rebinding]] = {}
_skipped: set[str] = set()
_missing: dict[str, str] = {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
  """The state of the connection."""

  changed: bool  # by this call
  hooked: bool  # patch points are applied to modules that are imported from now on
  touched: tuple[str, ...] = ()  # qualified names that are replaced in MaxText now
  pending: tuple[str, ...] = ()  # MaxText modules whose patch point waits for their import
  skipped: tuple[str, ...] = ()  # MaxText modules that have the patch point themselves and use our entry points
  missing: tuple[str, ...] = ()  # features for which this MaxText looks different, with the difference

  def __str__(self) -> str:
    lines = ["maxtext_pp_ext is " + ("connected" if self.hooked else "not connected") + " with MaxText"]
    for title in ("touched", "pending", "skipped", "missing"):
      lines += [f"  {title}: {name}" for name in getattr(self, title)]
    return "\n".join(lines)


def install() -> Report:
  """Applies our patch points to the MaxText modules that are loaded, and to others when they are imported (`startup`).

  The environment variable MAXTEXT_PP_EXT has no effect here: it controls the start-up hook alone. A second call changes
  nothing. Existing configs and models keep the classes with which they were made. Such a config can no longer be pickled,
  since pickle finds classes by name. Raises HostVersionError, and changes nothing, if our patch point does not fit a
  loaded one.
  """
  # Imported ones. If another thread is importing one, this waits for it, before it takes the lock: that thread may be
  # about to take it in `apply`.
  loaded = [importlib.import_module(name) for name in startup.PATCH_POINT_MODULES if name in sys.modules]
  with _lock:
    if loaded or importlib.util.find_spec("maxtext") is not None:
      version.check_version()
    todo = [module for module in loaded if module.__name__ not in _applied and not _is_skipped(module)]
    for module in todo:
      _check(module)
    try:
      for module in todo:
        _apply(module)
    except BaseException:
      for module in todo:
        _undo(module.__name__)
      raise
    return _report(changed=startup.hook(apply) or bool(todo))


def uninstall() -> Report:
  """Restores everything that `install` or the start-up hook replaced, and stops applying patch points to further imports.

  From then on, a config made with another `pipeline_impl` than `host` gets MaxText's own pipeline, so make configs again.
  Raises RuntimeError, and changes nothing, if other code has replaced ours: restoring the originals would undo theirs.
  """
  with _lock:
    if changed_since := [name for rebindings in _applied.values() for name in rebindings[-1].changed_since()]:
      raise RuntimeError(
          f"maxtext_pp_ext cannot be uninstalled: {', '.join(changed_since)} was replaced by other code after us. "
          "Undo that first."
      )
    changed = startup.unhook() or bool(_applied)
    for name in reversed(list(_applied)):
      _undo(name)
    _skipped.clear()
    _missing.clear()
    return _report(changed=changed)


def status() -> Report:
  """The state of the connection; changes nothing."""
  with _lock:
    return _report()


def apply(module: ModuleType) -> None:
  """Applies the patch point of a module that was just executed. Raises HostVersionError if it does not fit."""
  with _lock:
    if _is_skipped(module):
      return
    version.check_version()
    _check(module)
    _apply(module)


def _check(module: ModuleType) -> None:
  for part in table.PATCH_POINTS[module.__name__]:
    if part.required:
      part.check(module)


def _apply(module: ModuleType) -> None:
  """Applies a checked patch point completely or not at all."""
  rebinding = rebind.Rebinding()
  try:
    for part in table.PATCH_POINTS[module.__name__]:
      _missing.pop(part.name, None)
      try:
        if not part.required:
          part.check(module)
      except version.HostVersionError as error:
        _missing[part.name] = str(error)
        part.refuse(module, rebinding, str(error))
      else:
        part.apply(module, rebinding)
  except BaseException:
    rebinding.undo()
    raise
  _applied.setdefault(module.__name__, []).append(rebinding)


def _undo(name: str) -> None:
  for rebinding in reversed(_applied.pop(name, [])):
    rebinding.undo()


def _is_skipped(module: ModuleType) -> bool:
  is_official = table.official(module)
  (_skipped.add if is_official else _skipped.discard)(module.__name__)
  return is_official


def _report(*, changed: bool = False) -> Report:
  hooked = startup.hooked()
  settled = {*_applied, *_skipped}
  return Report(
      changed=changed,
      hooked=hooked,
      touched=tuple(name for rebindings in _applied.values() for rebinding in rebindings for name in rebinding.touched),
      pending=tuple(name for name in startup.PATCH_POINT_MODULES if hooked and name not in settled),
      skipped=tuple(sorted(_skipped)),
      missing=tuple(f"{name}: {why}" for name, why in _missing.items()),
  )

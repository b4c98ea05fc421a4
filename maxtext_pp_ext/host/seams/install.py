# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Connects this package with MaxText and takes it back: all seams or none.

A seam is applied when its module is imported (`startup`), or at once if that has happened already. `install` checks every
loaded module before it touches the first, and puts everything back if one of them fails.
"""

import dataclasses
import importlib
import importlib.util
import sys
import threading
from types import ModuleType

from maxtext_pp_ext.host import startup
from maxtext_pp_ext.host.seams import rebind, table, version

_lock = threading.RLock()
# A module that is reloaded, or removed and imported again, gets its seam again; what bound the older objects keeps them.
_applied: dict[str, list[rebind.Rebinding]] = {}
_stood_aside: set[str] = set()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
  """What is connected.

  Attributes:
    changed: whether this call changed anything.
    hooked: whether seams are applied to modules that are imported from now on.
    touched: qualified names of what is replaced in MaxText now.
    pending: MaxText modules whose seam waits for their import.
    stood_aside: MaxText modules that have the seam themselves and use our entry points; we left them alone.
  """

  changed: bool
  hooked: bool
  touched: tuple[str, ...] = ()
  pending: tuple[str, ...] = ()
  stood_aside: tuple[str, ...] = ()

  def __str__(self) -> str:
    lines = ["maxtext_pp_ext is " + ("connected" if self.hooked else "not connected") + " with MaxText"]
    for title in ("touched", "pending", "stood_aside"):
      lines += [f"  {title.replace('_', ' ')}: {name}" for name in getattr(self, title)]
    return "\n".join(lines)


def install() -> Report:
  """Applies our seams to the MaxText modules that are loaded, and to the others when they are imported.

  It does so whatever MAXTEXT_PP_EXT says, which is about the start-up hook alone. Repeating it changes nothing. Configs
  and models that exist already keep the classes they were made with; such a config can no longer be pickled, since
  pickle finds classes by name.

  Raises:
    version.HostVersionError: a loaded module is not what our seam was written for. Nothing is changed then.
  """
  loaded = _loaded()
  with _lock:
    if loaded or importlib.util.find_spec("maxtext") is not None:
      version.check_version()
    todo = [module for module in loaded if module.__name__ not in _applied]
    todo = [module for module in todo if not _stands_aside(module)]
    for module in todo:
      table.SEAMS[module.__name__].check(module)
    done = []
    try:
      for module in todo:
        _apply(module)
        done.append(module)
    except BaseException:
      for module in done:
        _undo(module.__name__)
      raise
    hooked = startup.hook()
    return _report(changed=hooked or bool(todo))


def uninstall() -> Report:
  """Puts back everything that `install` or the start-up hook replaced, and stops applying seams to further imports.

  Configs and models that exist already keep the classes they were made with. A config that was made with another
  `pipeline_impl` than `host` gets MaxText's own pipeline from then on: make configs anew.

  Raises:
    RuntimeError: somebody else has replaced, after us, what we had replaced, so that putting back ours would undo
      theirs. Nothing is changed then.
  """
  with _lock:
    changed_since = [name for rebindings in _applied.values() for name in rebindings[-1].changed_since()]
    if changed_since:
      raise RuntimeError(
          f"maxtext_pp_ext cannot be uninstalled: {', '.join(changed_since)} was replaced by somebody else after us. "
          "Undo that first."
      )
    unhooked = startup.unhook()
    had_applied = bool(_applied)
    for name in reversed(list(_applied)):
      _undo(name)
    _stood_aside.clear()
    return _report(changed=unhooked or had_applied)


def status() -> Report:
  """What is connected now; changes nothing."""
  with _lock:
    return _report(changed=False)


def apply(module: ModuleType) -> None:
  """Applies the seam of a module that has just been executed; called by `startup.SeamLoader`.

  Raises:
    version.HostVersionError: the module is not what our seam was written for. Its import fails with that.
  """
  with _lock:
    if _stands_aside(module):
      return
    version.check_version()
    table.SEAMS[module.__name__].check(module)
    _apply(module)


def _apply(module: ModuleType) -> None:
  """Applies a seam that was checked, wholly or not at all."""
  rebinding = rebind.Rebinding()
  try:
    table.SEAMS[module.__name__].apply(module, rebinding)
  except BaseException:
    rebinding.undo()
    raise
  _applied.setdefault(module.__name__, []).append(rebinding)


def _undo(name: str) -> None:
  for rebinding in reversed(_applied.pop(name)):
    rebinding.undo()


def _stands_aside(module: ModuleType) -> bool:
  if not table.official(module):
    _stood_aside.discard(module.__name__)
    return False
  _stood_aside.add(module.__name__)
  return True


def _loaded() -> list[ModuleType]:
  """The seam modules that are imported, completely: if another thread is importing one, waits for it."""
  names = [name for name in startup.SEAM_MODULES if name in sys.modules]
  # Before the lock is taken: that thread may be about to take it in `apply`.
  return [importlib.import_module(name) for name in names]


def _report(*, changed: bool) -> Report:
  hooked = any(isinstance(finder, startup.SeamFinder) for finder in sys.meta_path)
  settled = {*_applied, *_stood_aside}
  return Report(
      changed=changed,
      hooked=hooked,
      touched=tuple(name for rebindings in _applied.values() for rebinding in rebindings for name in rebinding.touched),
      pending=tuple(name for name in startup.SEAM_MODULES if hooked and name not in settled),
      stood_aside=tuple(sorted(_stood_aside)),
  )

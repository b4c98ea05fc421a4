# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""All that runs at interpreter start-up: `maxtext_pp_ext.pth` in site-packages calls `at_startup()`.

It adds one finder to `sys.meta_path`. The finder answers for the module names below, and for no other; for
those it lets the usual finders find the module, and calls `host.seams.install.apply` right after the module has
executed. No file is read, nothing is started, and nothing else is imported until then. `MAXTEXT_PP_EXT=off` switches it
off.
"""

import os
import sys

SEAM_MODULES = (
    "maxtext.configs.types",
    "maxtext.configs.pyconfig",
    "maxtext.layers.pipeline",
    "maxtext.layers.nnx_decoders",
    "maxtext.utils.model_creation_utils",
    "maxtext.common.checkpointing",
    "maxtext.training_engine.checkpointing",
)


class SeamFinder:
  """Finds MaxText's seam modules as the other finders do, and has our seams applied when they are loaded."""

  def find_spec(self, name, path=None, target=None):
    if name not in SEAM_MODULES:
      return None
    for finder in sys.meta_path:
      if finder is self or not hasattr(finder, "find_spec"):
        continue
      spec = finder.find_spec(name, path, target)
      if spec is not None:
        if hasattr(spec.loader, "exec_module"):
          spec.loader = SeamLoader(spec.loader)  # type: ignore[assignment]  # without the import of importlib.abc
        return spec
    return None


class SeamLoader:
  """Loads like the loader it wraps, puts that one back, then applies our seam; what that raises ends the import."""

  def __init__(self, loader):
    self.loader = loader

  def create_module(self, spec):
    return self.loader.create_module(spec)

  def exec_module(self, module):
    module.__spec__.loader = module.__loader__ = self.loader
    self.loader.exec_module(module)
    from maxtext_pp_ext.host.seams import install  # pylint: disable=import-outside-toplevel

    install.apply(module)

  def __getattr__(self, name):
    return getattr(self.loader, name)


OFF, ON = ("off", "0", "false", "no"), ("", "on", "1", "true", "yes")


def setting():
  """The value of the environment variable MAXTEXT_PP_EXT."""
  return os.environ.get("MAXTEXT_PP_EXT", "").strip().lower()


def hook():
  """Adds the finder unless it is there. Returns whether it added it."""
  if any(isinstance(finder, SeamFinder) for finder in sys.meta_path):
    return False
  sys.meta_path.insert(0, SeamFinder())
  return True


def unhook():
  """Removes the finder. Returns whether it was there."""
  found = [finder for finder in sys.meta_path if isinstance(finder, SeamFinder)]
  for finder in found:
    sys.meta_path.remove(finder)
  return bool(found)


def at_startup():
  """The one call in `maxtext_pp_ext.pth`."""
  value = setting()
  if value not in OFF and hook() and value not in ON:
    # A line, not an exception: this runs in every Python of the environment, whatever its program is.
    print(f"maxtext_pp_ext is on: MAXTEXT_PP_EXT={value!r} is none of {', '.join((*OFF, *ON[1:]))}", file=sys.stderr)

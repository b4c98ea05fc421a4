# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""All that runs at interpreter start-up: `maxtext_pp_ext.pth` in site-packages calls `maxtext_pp_ext.at_startup()`.

It adds one finder to `sys.meta_path`, which answers for the module names below only. It lets the usual finders find such
a module, and calls `connect` with it right after it was executed. Until then no file is read, nothing is started, and
nothing else is imported. `MAXTEXT_PP_EXT=off` switches it off.
"""

import os
import sys

PATCH_POINT_MODULES = (
    "maxtext.configs.types",
    "maxtext.configs.pyconfig",
    "maxtext.layers.pipeline",
    "maxtext.layers.nnx_decoders",
    "maxtext.utils.model_creation_utils",
    "maxtext.common.checkpointing",
    "maxtext.training_engine.checkpointing",
)
OFF, ON = ("off", "0", "false", "no"), ("", "on", "1", "true", "yes")


class PatchPointFinder:
  """Finds the modules as the other finders do, and has `connect` called with each when it was loaded."""

  def __init__(self, connect):
    self.connect = connect

  def find_spec(self, name, path=None, target=None):
    if name not in PATCH_POINT_MODULES:
      return None
    for finder in [each for each in sys.meta_path if each is not self and hasattr(each, "find_spec")]:
      if (spec := finder.find_spec(name, path, target)) is not None:
        if hasattr(spec.loader, "exec_module"):
          spec.loader = PatchPointLoader(spec.loader, self.connect)  # type: ignore[assignment]  # importlib.abc is not imported
        return spec
    return None


class PatchPointLoader:
  """Loads like the loader it wraps, puts that one back, then calls `connect`; what that raises ends the import."""

  def __init__(self, loader, connect):
    self.loader, self.connect = loader, connect

  def exec_module(self, module):
    module.__spec__.loader = module.__loader__ = self.loader
    self.loader.exec_module(module)
    self.connect(module)

  def __getattr__(self, name):
    return getattr(self.loader, name)


def setting():
  """The value of the environment variable MAXTEXT_PP_EXT."""
  return os.environ.get("MAXTEXT_PP_EXT", "").strip().lower()


def hooked():
  return any(isinstance(finder, PatchPointFinder) for finder in sys.meta_path)


def hook(connect):
  """Adds the finder unless it is there. Returns whether it added it."""
  is_new = not hooked()
  if is_new:
    sys.meta_path.insert(0, PatchPointFinder(connect))
  return is_new


def unhook():
  """Removes the finder. Returns whether it was there."""
  found = hooked()
  sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, PatchPointFinder)]
  return found


def at_startup(connect=None):
  """Adds the finder unless MAXTEXT_PP_EXT is off. Without `connect`, as older .pth files call it: the package's own."""
  if connect is None:
    import maxtext_pp_ext  # pylint: disable=import-outside-toplevel

    maxtext_pp_ext.at_startup()
    return
  value = setting()
  if value not in OFF and hook(connect) and value not in ON:
    # A line, not an exception: this runs in every Python of the environment, whatever its program is.
    print(f"maxtext_pp_ext is on: MAXTEXT_PP_EXT={value!r} is none of {', '.join((*OFF, *ON[1:]))}", file=sys.stderr)

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Pipeline parallelism for MaxText, switched on by one config key: `pipeline_impl`.

This module runs at the start of every interpreter of an environment that has the package (see `host.startup`), so it
imports nothing.

PYTEST_DONT_REWRITE: the package has a pytest plugin, so pytest would warn in every run that this module was imported
before it could rewrite assertions in it.
"""

__version__ = "0.1.0"

__all__ = ["__version__", "install", "uninstall"]


def at_startup():
  """The one call in `maxtext_pp_ext.pth`: connects this package with each module of MaxText when it is imported."""
  from maxtext_pp_ext.host import startup  # pylint: disable=import-outside-toplevel

  startup.at_startup(_connect)


def install():
  """Connects this package with MaxText now, whatever the start-up hook did; see `host.patch_points.install.install`."""
  from maxtext_pp_ext.host.patch_points import install as implementation  # pylint: disable=import-outside-toplevel

  return implementation.install()


def uninstall():
  """Undoes `install` and the start-up hook; see `host.patch_points.install.uninstall`."""
  from maxtext_pp_ext.host.patch_points import install as implementation  # pylint: disable=import-outside-toplevel

  return implementation.uninstall()


def _connect(module):
  from maxtext_pp_ext.host.patch_points import install as implementation  # pylint: disable=import-outside-toplevel

  implementation.apply(module)

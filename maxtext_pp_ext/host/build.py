# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Build command that puts `maxtext_pp_ext.pth` at the top of the wheel, so that it lands in site-packages.

setup.cfg names it: `[options] cmdclass = build_py = maxtext_pp_ext.host.build.BuildPy`. setuptools loads this file by
its path before the package can be imported, so it imports nothing of this package.
"""

import os

from setuptools.command.build_py import build_py

PTH_NAME = "maxtext_pp_ext.pth"
PTH_LINE = "import maxtext_pp_ext; maxtext_pp_ext.at_startup()\n"


class BuildPy(build_py):
  """setuptools' `build_py`, plus the start-up hook, for wheels and for editable wheels."""

  def run(self):
    super().run()
    self.mkpath(self._pth_folder())
    with open(self._pth_path(), "w", encoding="ascii") as file:
      file.write(PTH_LINE)

  def get_outputs(self, include_bytecode=True):
    # An editable wheel maps outputs to source files; the hook has none and is written into that wheel directly.
    outputs = super().get_outputs(include_bytecode)
    return outputs if self.editable_mode else [*outputs, self._pth_path()]

  def _pth_folder(self):
    # `editable_wheel` discards build_lib and packs the folder in which `install` would put modules.
    return self.get_finalized_command("install").install_lib if self.editable_mode else self.build_lib

  def _pth_path(self):
    return os.path.join(self._pth_folder(), PTH_NAME)

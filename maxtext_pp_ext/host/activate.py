# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""`python -m maxtext_pp_ext.host.activate`: puts the start-up hook into this environment's site-packages.

Wheels and editable installs include the hook. This command is for a checkout that is only on the path; it also shows
whether the hook is there. `--remove` removes the hook, `--path` prints its path.
"""

import argparse
import pathlib
import sys
import sysconfig

PTH_NAME = "maxtext_pp_ext.pth"
PTH_LINE = "import maxtext_pp_ext; maxtext_pp_ext.at_startup()\n"


def pth_path() -> pathlib.Path:
  """Returns the path at which this interpreter looks for the hook."""
  return pathlib.Path(sysconfig.get_path("purelib"), PTH_NAME)


def main(arguments: list[str] | None = None) -> int:
  parser = argparse.ArgumentParser(prog="python -m maxtext_pp_ext.host.activate", description=__doc__)
  group = parser.add_mutually_exclusive_group()
  group.add_argument("--remove", action="store_true", help="remove the hook")
  group.add_argument("--path", action="store_true", help="print the hook's path and whether it is there")
  options = parser.parse_args(arguments)
  path = pth_path()
  if options.path:
    print(f"{path} ({'there' if path.exists() else 'not there'})")
  elif options.remove:
    path.unlink(missing_ok=True)
    print(f"removed {path}")
  else:
    root = pathlib.Path(__file__).resolve().parents[2]
    installed = root == path.parent.resolve()  # otherwise the checkout's folder comes first
    path.write_text(PTH_LINE if installed else f"{root}\n{PTH_LINE}", encoding="utf-8")
    print(f"wrote {path}")
  return 0


if __name__ == "__main__":
  sys.exit(main())

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Prints the names of the presets, or the path of one; see the package."""

import argparse

from maxtext_pp_ext import presets


def main() -> None:
  parser = argparse.ArgumentParser(prog="python -m maxtext_pp_ext.presets", description="Prints a preset's path.")
  parser.add_argument("name", nargs="?", choices=presets.names(), help="without it, prints the names")
  name = parser.parse_args().name
  print(presets.path(name) if name else "\n".join(presets.names()))


if __name__ == "__main__":
  main()

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Packages beside this one. Standard library only."""

# This package with its extras. It is in no package registry.
HOW = "pip install '.[cpu,tools]' in a checkout, or pip install 'maxtext_pp_ext-….whl[cpu,tools]' of a wheel"


def version(name: str) -> str | None:
  """The version of an installed package; None if it is not installed."""
  from importlib import metadata  # pylint: disable=import-outside-toplevel  # slow, for commands that need no version

  try:
    return metadata.version(name)
  except metadata.PackageNotFoundError:
    return None

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Config files for pipelines that need more than a few keys. They replace MaxText's base.yml, and inherit it.

python -m maxtext_pp_ext.presets        the names
python -m maxtext_pp_ext.presets NAME   the path of one
"""

import pathlib

from maxtext_pp_ext.nearest import did_you_mean

_FOLDER = pathlib.Path(__file__).parent


def names() -> list[str]:
  """Returns the names of all presets."""
  return sorted(file.stem for file in _FOLDER.glob("*.yml"))


def path(name: str) -> str:
  """Returns the path of a preset, which MaxText takes as its config file.

  Raises:
    ValueError: there is no preset of that name.
  """
  if name not in names():
    raise ValueError(f"There is no preset {name!r}, only {', '.join(names())}{did_you_mean(name, names())}")
  return str(_FOLDER / f"{name}.yml")

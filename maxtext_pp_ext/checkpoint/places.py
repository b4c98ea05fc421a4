# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The folders of a conversion. Imports nothing heavy, so a wrong path is reported at once."""

from __future__ import annotations

import os
import pathlib

from maxtext_pp_ext.checkpoint import unfinished

ITEMS = "items"  # MaxText's name of its train state, beside the state of a data iterator
TREE = "_METADATA"  # in the folder of each tree saved by Orbax


def find_items(root: pathlib.Path) -> pathlib.Path | None:
  """Returns the folder of a checkpoint's train state, or None if there is no checkpoint."""
  return next((folder for folder in (root / ITEMS, root) if (folder / TREE).is_file()), None)


def steps(folder: pathlib.Path) -> list[int]:
  """Returns the steps that have a checkpoint in a run's `checkpoints` folder."""
  if not folder.is_dir():
    return []
  return sorted(int(step.name) for step in folder.iterdir() if step.name.isdecimal() and find_items(step))


def source_and_destination(source: str, destination: str, step: int | None) -> tuple[pathlib.Path, pathlib.Path]:
  """Returns the folders of the old and the new checkpoint.

  Raises:
    FileNotFoundError: there is no such checkpoint.
    FileExistsError: the destination exists, or the unfinished folder of an interrupted conversion.
    ValueError: they are not on a file system, or a step is given for a single checkpoint, or the destination
      is within the source, or the source is unfinished itself.
  """
  for path in (source, destination):
    if "://" in path:
      raise ValueError(f"{path}: only files can be converted, since object stores cannot rename; mount it, or copy it.")
  # os.path's leaves the `~` of an unknown user in place, as shells do; pathlib's raises.
  old, new = (pathlib.Path(os.path.expanduser(path)).absolute() for path in (source, destination))
  if old.name == ITEMS and find_items(old.parent) == old:
    old = old.parent
  new = new.parent if new.name == ITEMS else new
  if find_items(old) is not None:
    if step is not None:
      raise ValueError(f"--step {step}: {old} is a checkpoint, not a folder of several.")
  else:
    there = steps(old)
    if not there:
      raise FileNotFoundError(f"There is no Orbax checkpoint in {old}.")
    if step is not None and step not in there:
      raise FileNotFoundError(f"There is no checkpoint of step {step} in {old}; there are {', '.join(map(str, there))}.")
    name = str(there[-1] if step is None else step)
    old, new = old / name, new / name
  if (old / unfinished.MARKER).exists():
    raise ValueError(f"{old} is an unfinished conversion, and no checkpoint.")
  unfinished.check_absent(new)
  if old in new.parents:
    raise ValueError(f"{new} is within {old}.")
  return old, new

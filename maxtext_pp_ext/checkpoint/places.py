# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The folders of a conversion. Imports nothing heavy, so a wrong path is reported at once.

The folder of a conversion that has not ended has a marker, which says so and is locked while the conversion runs. The
next conversion to the same place tells by it what a killed one has left. A folder without it is somebody else's.
"""

from collections.abc import Iterator
import contextlib
import fcntl
import os
import pathlib
import shlex

ITEMS = "items"  # MaxText's name of its train state, beside the state of a data iterator
TREE = "_METADATA"  # in the folder of each tree saved by Orbax
SUFFIX = ".orbax-checkpoint-tmp"  # Orbax neither loads nor counts a folder whose name ends so
MARKER = ".unfinished-conversion"
_TEXT = "An unfinished conversion of `maxtext-pp convert`. If none runs, this folder may be removed.\n"


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

  Raises FileNotFoundError if there is no such checkpoint, FileExistsError as `check_absent` does, and ValueError if they
  are not on a file system, a step is given for a single checkpoint, the destination is within the source, or the source
  is unfinished itself.
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
    if not (there := steps(old)):
      raise FileNotFoundError(_none_in(old))
    if step is not None and step not in there:
      raise FileNotFoundError(f"There is no checkpoint of step {step} in {old}; there are {', '.join(map(str, there))}.")
    name = str(there[-1] if step is None else step)
    old, new = old / name, new / name
  if (old / MARKER).exists():
    raise ValueError(f"{old} is an unfinished conversion, and no checkpoint.")
  check_absent(new)
  if old in new.parents:
    raise ValueError(f"{new} is within {old}.")
  return old, new


def _none_in(path: pathlib.Path) -> str:
  """Says that there is no checkpoint in `path`, and where else there are some."""
  if not path.exists():
    return f"{path} does not exist."
  if not path.is_dir():
    return f"{path} is a file. A checkpoint is a folder."
  # MaxText has them in base_output_directory/run_name/checkpoints.
  below = (found for pattern in ("checkpoints", "*/checkpoints") for found in sorted(path.glob(pattern)) if steps(found))
  other = None
  with contextlib.suppress(PermissionError):  # of folders of another user
    other = next(below, None)
  return f"There is no Orbax checkpoint in {path}" + (f", but there are some in {other}." if other else ".")


def folder_of(destination: pathlib.Path) -> pathlib.Path:
  """Returns the folder in which a conversion to this destination is written."""
  return destination.with_name(destination.name + SUFFIX)


def check_absent(destination: pathlib.Path) -> None:
  """Raises FileExistsError if the destination exists, or the folder in which it would be written; says what that is."""
  folder = folder_of(destination)
  if not destination.exists() and (folder / MARKER).is_file():
    if runs := _runs(folder):
      raise FileExistsError(f"{folder} is being written by another conversion; nothing is overwritten.")
    if_none = "If none runs any more that writes it, it" if runs is None else "It"
    raise FileExistsError(
        f"{folder} is an unfinished conversion, which was stopped before its end: no checkpoint. {if_none} may be "
        f"removed; then convert again:\n  rm -r {shlex.quote(str(folder))}"
    )
  if there := [path for path in (destination, folder) if path.exists()]:
    raise FileExistsError(f"{there[0]} exists; nothing is overwritten.")


def _runs(folder: pathlib.Path) -> bool | None:
  """Returns whether the conversion that writes into a folder still runs; None if that cannot be told."""
  try:
    with open(folder / MARKER, "r+", encoding="utf-8") as marker:
      fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError:
    return True
  except OSError:  # a file system without locks, or a file of another user
    return None
  return False


@contextlib.contextmanager
def marked(folder: pathlib.Path) -> Iterator[None]:
  """Marks a new folder as an unfinished conversion; unmarks it at the end, unless there is an error."""
  with open(folder / MARKER, "x", encoding="utf-8") as marker:
    marker.write(_TEXT)
    marker.flush()
    with contextlib.suppress(OSError):  # a file system without locks
      fcntl.flock(marker, fcntl.LOCK_EX)
    yield
    (folder / MARKER).unlink()

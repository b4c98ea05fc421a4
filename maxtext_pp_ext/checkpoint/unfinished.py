# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The folder of a conversion that has not ended: it has a marker, which says so and is locked while the conversion runs.

A conversion that is killed leaves the folder. The next one to the same place finds the marker, and says what the folder
is. A folder without the marker is somebody else's.
"""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import fcntl
import pathlib
import shlex

SUFFIX = ".orbax-checkpoint-tmp"  # Orbax neither loads nor counts a folder whose name ends so
MARKER = ".unfinished-conversion"
_TEXT = "An unfinished conversion of `maxtext-pp convert`. If none runs, this folder may be removed.\n"


def folder_of(destination: pathlib.Path) -> pathlib.Path:
  """Returns the folder in which a conversion to this destination is written."""
  return destination.with_name(destination.name + SUFFIX)


def check_absent(destination: pathlib.Path) -> None:
  """Raises FileExistsError if the destination exists, or the folder in which it would be written; says what that is."""
  folder = folder_of(destination)
  if not destination.exists() and (folder / MARKER).is_file():
    raise FileExistsError(_about_unfinished(folder))
  if there := [path for path in (destination, folder) if path.exists()]:
    raise FileExistsError(f"{there[0]} exists; nothing is overwritten.")


def _about_unfinished(folder: pathlib.Path) -> str:
  runs = _runs(folder)
  if runs:
    return f"{folder} is being written by another conversion; nothing is overwritten."
  if_none = "If none runs any more that writes it, it" if runs is None else "It"
  return (
      f"{folder} is an unfinished conversion, which was stopped before its end: no checkpoint. {if_none} may be removed; "
      f"then convert again:\n  rm -r {shlex.quote(str(folder))}"
  )


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

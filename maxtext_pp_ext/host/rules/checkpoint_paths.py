# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Refuses checkpoint paths that Orbax refuses only at its first write, after the first step.

Orbax gives TensorStore `gs://` paths and absolute paths only (`tensorstore_utils` of Orbax, with MaxText 0.2.5).
"""

from collections.abc import Callable, Iterator
import os
from typing import Any

_TRUE = ("true", "yes", "on", "y", "t", "1")


def problems(value_of: Callable[[str], Any]) -> Iterator[str]:
  """The problems with the paths to which a run writes checkpoints; `value_of` gives the value of a key, or None."""
  is_on = lambda key: str(value_of(key)).lower() in _TRUE
  if not is_on("enable_checkpointing"):
    return
  asking = {"base_output_directory": "enable_checkpointing"}
  for key in ("enable_emergency_checkpoint", "enable_multi_tier_checkpointing"):
    if is_on(key):
      asking["local_checkpoint_directory"] = key
  for key, by in asking.items():
    if _is_relative(path := value_of(key)):
      without = f"{by}=False" if by == "enable_checkpointing" else f"enable_checkpointing=False and {by}=False"
      yield (
          f"{key}={path} with {by}=True: Orbax writes checkpoints only to absolute paths and gs://, and would fail at "
          f"the first one. Set {key}{_remedy(path)}, or {without}."
      )


def of_loading(value_of: Callable[[str], Any]) -> list[str]:
  """The problems with the paths from which a run loads; the run itself would stop before its first step."""
  given = {key: value_of(key) for key in ("load_parameters_path", "load_full_state_path")}
  what = "Orbax reads checkpoints only at absolute paths and gs://."
  return [f"{key}={path}: {what} Set {key}{_remedy(path)}." for key, path in given.items() if _is_relative(path)]


def _is_relative(path: Any) -> bool:
  return isinstance(path, str) and path != "" and not path.startswith("gs://") and not os.path.isabs(path)


def _remedy(path: str) -> str:
  if "://" in path:
    return " to an absolute path, or to one that begins with gs://"
  return f"={os.path.abspath(os.path.expanduser(path))}"

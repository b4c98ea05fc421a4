# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Refuses a checkpoint of another layout before MaxText tries to load it, and says how to convert it.

MaxText 0.2.4 and 0.2.5 fail, too: a run's own checkpoint, load_parameters_path and load_full_state_path end in a list of
weights that are missing, or in "Requested shape … is not compatible with the stored shape".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import math
import os
import re
import shlex
import sys
from typing import Any

from maxtext_pp_ext.checkpoint import guess
from maxtext_pp_ext.checkpoint.layout import Path, Shape
from maxtext_pp_ext.config_view import ConfigView


class WrongLayoutError(ValueError):
  """A checkpoint is of this model, and of another layout; the message names both and the command that converts it."""


def refuse_other_layouts(
    *,
    checkpoint_manager: Any,
    load_parameters_from_path: str,
    load_full_state_from_path: str,
    abstract_unboxed_pre_state: Any,
    step: int,
    source_checkpoint_layout: str,
    maxtext_config: Any,
    **others: Any,
) -> None:
  """Compares what is about to be loaded with the model that is to get it.

  What is no checkpoint of Orbax, or of another model, is left to MaxText.

  Args:
    checkpoint_manager: of the run's own checkpoints; None if there are none.
    load_parameters_from_path: MaxText's key load_parameters_path, used where the run has no checkpoint.
    load_full_state_from_path: load_full_state_path, as well.
    abstract_unboxed_pre_state: the train state without arrays.
    step: of the run's own checkpoint; the last one if negative.
    source_checkpoint_layout: what is at the paths; only "orbax" is looked at.
    maxtext_config: MaxText's config.
    **others: the other arguments of MaxText's load_state_if_possible.

  Raises:
    WrongLayoutError: the layouts differ.
  """
  del others
  config = maxtext_config
  found = _what_is_loaded(checkpoint_manager, load_parameters_from_path, load_full_state_from_path, step)
  if config is None or found is None:
    return
  folder, own_step = found
  if own_step is None and source_checkpoint_layout != "orbax":
    return
  stored, wanted = _stored(folder), _wanted(abstract_unboxed_pre_state)
  if not stored or stored == wanted or _size(stored) != _size(wanted):
    return
  from maxtext_pp_ext.host import layouts  # pylint: disable=import-outside-toplevel

  raise WrongLayoutError(
      f"The checkpoint {folder} has another layout than this run's model:\n"
      f"  checkpoint: {_describe(stored, config)}\n"
      f"  this run:   {layouts.describe(config)}\n"
      f"Convert it, which changes no value and keeps the optimizer's state:\n"
      f"  {_command(folder, own_step, config)}"
  )


def _what_is_loaded(manager: Any, load_parameters_path: str, load_full_state_path: str, step: int):
  """(the checkpoint's folder, its step if it is the run's own) or None, in the order in which MaxText looks."""
  if manager is not None:
    if not hasattr(manager, "directory"):
      return None  # of emergency checkpoints, which are in memory
    if step < 0:
      latest = getattr(manager, "latest", None)
      if callable(getattr(manager, "latest_step", None)):  # MaxText 0.2.4
        step = manager.latest_step()
        step = -1 if step is None else step
      elif latest is not None:
        step = latest.step
    if step >= 0:
      return os.path.join(str(manager.directory), str(step)), step
  path = load_parameters_path or load_full_state_path
  return (str(path).rstrip("/").removesuffix("/items"), None) if path else None


def _stored(folder: str) -> dict[Path, Shape]:
  """Parameters of the checkpoint's decoder; none if there is no checkpoint that can be read."""
  from etils import epath  # pylint: disable=import-outside-toplevel
  import jax  # pylint: disable=import-outside-toplevel
  import orbax.checkpoint as ocp  # pylint: disable=import-outside-toplevel

  try:
    root = epath.Path(folder)
    items = next(path for path in (root / "items", root) if (path / "_METADATA").exists())
    tree = ocp.PyTreeCheckpointHandler().metadata(items).tree
    weights = {"params": {"params": tree["params"]["params"]}}
  except Exception:  # pylint: disable=broad-exception-caught
    return {}  # MaxText's affair
  leaves = jax.tree_util.tree_leaves_with_path(weights, is_leaf=lambda x: hasattr(x, "shape"))
  return _of_decoder({tuple(str(key.key) for key in path): tuple(leaf.shape) for path, leaf in leaves})


def _wanted(abstract_state: Any) -> dict[Path, Shape]:
  """Parameters of the model's decoder, named as in a checkpoint."""
  from flax import nnx  # pylint: disable=import-outside-toplevel

  if not isinstance(abstract_state, nnx.State):
    return {}
  model = abstract_state["model"] if "model" in abstract_state else abstract_state
  params = nnx.to_flat_state(nnx.filter_state(model, nnx.Param))
  shape = lambda leaf: tuple((leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf).shape)
  return _of_decoder({("params", "params", *map(str, path)): shape(leaf) for path, leaf in params})


def _of_decoder(shapes: Mapping[Path, Shape]) -> dict[Path, Shape]:
  return {path: shape for path, shape in shapes.items() if "decoder" in path}


def _size(shapes: Mapping[Path, Shape]) -> int:
  return sum(map(math.prod, shapes.values()))


def _describe(shapes: Mapping[Path, Shape], config: Any) -> str:
  from maxtext_pp_ext.host import layouts  # pylint: disable=import-outside-toplevel

  for values in guess.candidates(shapes, layers=layouts.layers_of_pipelined_kind(config), scan_layers=None):
    values = {"num_pipeline_repeats": 1, layouts.DCN_STAGES: 1} | values
    values["using_pipeline_parallelism"] = values[layouts.STAGES] > 1
    return layouts.describe(ConfigView(config, tuple(values.items())))
  return f"{len(shapes)} arrays in decoder"


def _command(folder: str, own_step: int | None, config: Any) -> str:
  """How to convert the checkpoint and how to load what comes of it."""
  arguments = _arguments_of_this_run(sys.argv[1:])
  if own_step is None:
    destination, then = f"{folder}-converted", f"give {folder}-converted instead of it"
  else:
    run = f"{config.run_name}-converted"
    destination = os.path.join(config.base_output_directory, run, "checkpoints", str(own_step))
    then = f"go on with run_name={run}"
  return f"maxtext-pp convert {shlex.quote(folder)} {shlex.quote(destination)} {arguments}\nThen {then}."


def _arguments_of_this_run(argv: Sequence[str]) -> str:
  are_maxtexts = bool(argv) and all(re.match(r"\w+=", text) or text.endswith((".yml", ".yaml")) for text in argv)
  return shlex.join(argv) if are_maxtexts else "CONFIG key=value ... (the arguments of this run)"

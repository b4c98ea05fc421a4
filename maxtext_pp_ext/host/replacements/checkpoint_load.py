# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Refuses a checkpoint of another layout before MaxText tries to load it, and says how to convert it.

It also refuses an incomplete checkpoint if MaxText would not say what it lacks. MaxText (0.2.5) loads checkpoints with:

- `load_state_if_possible`, of the pre-trainer. It fails if layouts differ: with a list of missing weights, or with
  "Requested shape … is not compatible with the stored shape". Missing parts of the optimizer's state begin anew.
- `from_pretrained`, of the post-trainers, which does not fail. It pads arrays that are shorter than the model's by
  repeating their values, and leaves out layers that the model has at other paths. It reports nothing while at most 80 %
  of the model's arrays are missing. If one is missing, it may fail with "Array has been deleted".
- `CheckpointManager.restore_checkpoint`, of the training engine. It logs an error, and the model keeps its values.
"""

from collections.abc import Callable, Mapping
import contextvars
import dataclasses
import inspect
import operator
import os
import re
import shlex
import sys
from typing import Any

from flax import nnx

from maxtext_pp_ext.checkpoint import complete, guess
from maxtext_pp_ext.checkpoint.layout import Path, Shape
from maxtext_pp_ext.config.derived import layers_to_choose_from
from maxtext_pp_ext.config.keys import DerivedKeys
from maxtext_pp_ext.config.view import plain, with_values
from maxtext_pp_ext.errors import Refusal
from maxtext_pp_ext.host.models import checkpoints, layouts
from maxtext_pp_ext.host.models.checkpoints import size, Stored

in_from_pretrained: contextvars.ContextVar[bool] = contextvars.ContextVar("in_from_pretrained", default=False)


class WrongLayoutError(Refusal, ValueError):
  """A checkpoint and this run's model hold layers in different arrays. The message says how to convert it if possible."""


class IncompleteCheckpointError(Refusal, ValueError):
  """A checkpoint lacks arrays, and MaxText would not say which; the message names them."""


def refuse_other_layouts(
    *,
    checkpoint_manager: Any,
    load_parameters_from_path: str,
    load_full_state_from_path: str,
    abstract_unboxed_pre_state: Any,
    step: int,
    source_checkpoint_layout: str,
    maxtext_config: DerivedKeys | None,
    **others: Any,
) -> None:
  """Compares the checkpoint that `load_state_if_possible` is about to load with the model that is to get it.

  The arguments are those of that function. Checkpoints of other models, and formats other than Orbax's, are left to
  MaxText. Exception: "safetensors_dynamic" is refused for a model with a pipeline. Raises WrongLayoutError if layouts
  differ, IncompleteCheckpointError if the checkpoint has a part of the optimizer's state and lacks another part.
  """
  del others
  config = maxtext_config
  loaded = _what_is_loaded(checkpoint_manager, load_parameters_from_path or load_full_state_from_path, step)
  if config is None or loaded is None:
    return
  folder, own_step = loaded
  has_pipeline = getattr(config, "using_pipeline_parallelism", False)
  if own_step is None and source_checkpoint_layout == "safetensors_dynamic" and has_pipeline:
    raise WrongLayoutError(
        f"source_checkpoint_layout=safetensors_dynamic: MaxText can load {folder} only into a model without a pipeline. "
        f"This run's is: {layouts.describe(config)}.\n"
        "Convert it with maxtext.checkpoint_conversion.to_maxtext, without a pipeline, and then with `maxtext-pp "
        "convert` to this layout; load the result with source_checkpoint_layout=orbax."
    )
  if own_step is None and source_checkpoint_layout != "orbax":
    return
  found = checkpoints.read(folder)
  wanted = checkpoints.of_decoder(checkpoints.of_model(abstract_unboxed_pre_state))
  # Another size means another model; MaxText reports the difference.
  if found.shapes and found.shapes != wanted and size(found.shapes) == size(wanted):
    raise WrongLayoutError(_about_layouts(found, folder, own_step, config))
  if found.weights and (own_step is not None or not load_parameters_from_path):
    _refuse_parts_of_optimizer(found, abstract_unboxed_pre_state, folder, config)


def _refuse_parts_of_optimizer(found: Stored, abstract_state: Any, folder: str, config: DerivedKeys) -> None:
  """Raises IncompleteCheckpointError if MaxText would begin only a part of the optimizer's state anew."""
  lora = getattr(getattr(config, "lora", None), "enable_lora", False)
  if not isinstance(abstract_state, nnx.State) or "optimizer" not in abstract_state or found.why_not_converted:
    return
  # LoRA saves other arrays, and what this mask adds begins anew.
  if lora or plain(getattr(config, "trainable_parameters_mask", None)):
    return
  if problems := list(complete.lacking_of_optimizer(found.arrays, checkpoints.by_state(abstract_state))):
    heading = f"The checkpoint {folder} lacks a part of the optimizer's state, which would begin anew:"
    way_out = (
        "Load another checkpoint. Or load only the weights of this one, in a run of another name, with "
        f"load_parameters_path={folder}/items; then all of the optimizer's state begins anew."
    )
    raise IncompleteCheckpointError("\n".join([heading, *complete.listed(problems), way_out]))


def load_state_if_possible(own: Callable, *args: Any, **kwargs: Any) -> Any:
  """MaxText's function, unless what it would load is refused."""
  bound = inspect.signature(own).bind_partial(*args, **kwargs)  # a missing argument is MaxText's own error
  bound.apply_defaults()
  refuse_other_layouts(**bound.arguments)
  return own(*args, **kwargs)


def restore_checkpoint(own: Callable, manager: Any, checkpoint_state: Any, step: int | None = None) -> Any:
  """`CheckpointManager.restore_checkpoint`, unless what it would load, by default the last checkpoint, is refused."""
  saved = manager._checkpoint_manager  # pylint: disable=protected-access
  loaded = manager.get_latest_step() if saved is not None and step is None else step
  if saved is not None and loaded is not None:
    folder = os.path.join(str(saved.directory), str(loaded))
    model = getattr(checkpoint_state.model, "base", checkpoint_state.model)  # of Tunix's adapter
    other = "Checkpoints of the training engine cannot be converted. Set the keys of the checkpoint's layout."
    read = dataclasses.replace(checkpoints.read(os.path.join(folder, "model_params")), why_not_converted=other)
    wanted, config = checkpoints.of_model(nnx.state(model)), getattr(model, "config", None)
    _refuse_unlike(read, read.weights, wanted, folder, config, operator.eq)
  return own(manager, checkpoint_state, step)


def from_pretrained(own: Callable, *args: Any, **kwargs: Any) -> Any:
  """MaxText's function. It makes a model, which is where we judge what it is about to load."""
  token = in_from_pretrained.set(True)
  try:
    return own(*args, **kwargs)
  finally:
    in_from_pretrained.reset(token)


def refuse_other_layouts_of_pretrained(config: DerivedKeys, model: Any) -> None:
  """Compares the checkpoint that from_pretrained is about to load with the abstract model that is to get it.

  Raises WrongLayoutError if layouts differ, or one of the two has a pipeline and not all arrays agree. MaxText pads
  arrays for vLLM, so other differences in size are left to it; it pads no model with a pipeline. Raises
  IncompleteCheckpointError if weights of the model are missing.
  """
  if not config.load_parameters_path:
    return
  folder = _root(config.load_parameters_path)
  read = checkpoints.read(folder)
  of_model = checkpoints.of_model(nnx.state(model))
  # Arrays of custom_linear keep their initial values if a checkpoint lacks them.
  wanted = {path: shape for path, shape in of_model.items() if path in read.weights or "custom_linear" not in str(path)}
  _refuse_unlike(read, checkpoints.fused_as_in(wanted, read.weights), wanted, folder, config, checkpoints.agree)


def _refuse_unlike(read, weights, wanted, folder: str, config: DerivedKeys | None, agree: Callable[..., bool]) -> None:
  """Compares a checkpoint's weights with those of the model, both path -> shape."""
  found, of_model = checkpoints.of_decoder(weights), checkpoints.of_decoder(wanted)
  if found and not agree(found, of_model):
    if config is not None and size(found) == size(of_model):
      raise WrongLayoutError(_about_layouts(read, folder, None, config))
    if any("pipeline_module" in path for path in {*found, *of_model}):
      raise WrongLayoutError(_about_arrays(found, of_model, folder))
  if weights and (problems := list(checkpoints.lacking(weights, wanted))):
    heading = f"The checkpoint {folder} lacks weights of this run's model:"
    way_out = "Load a checkpoint that has them, or set the keys of the model that this checkpoint is of."
    raise IncompleteCheckpointError("\n".join([heading, *complete.listed(problems), way_out]))


def _what_is_loaded(manager: Any, path: str, step: int) -> tuple[str, int | None] | None:
  """Returns (folder, step) of the checkpoint that MaxText will load, or None. Only a run's own checkpoint has a step."""
  from maxtext.common import checkpointing  # pylint: disable=import-outside-toplevel

  if manager is not None:
    if not hasattr(manager, "directory"):
      return None
    if step < 0:
      latest = checkpointing.latest_step(manager)
      step = -1 if latest is None else latest
    if step >= 0:
      return os.path.join(str(manager.directory), str(step)), step
  return (_root(path), None) if path else None


def _root(path: Any) -> str:
  return str(path).rstrip("/").removesuffix("/items")


def _about_layouts(read: Stored, folder: str, own_step: int | None, config: DerivedKeys) -> str:
  """The message about a checkpoint of another layout than the model; `own_step`: its step if it is the run's own."""
  convert = "Convert it, which changes no value and keeps the optimizer's state:\n  "
  return (
      f"The checkpoint {folder} has another layout than this run's model:\n"
      f"  checkpoint: {_describe(read.shapes, config)}\n"
      f"  this run:   {layouts.describe(config)}\n"
      f"{read.why_not_converted or convert + _command(folder, own_step, config)}"
  )


def _about_arrays(found: Mapping[Path, Shape], wanted: Mapping[Path, Shape], folder: str) -> str:
  """The message about a checkpoint of another size than the model: it names the arrays that differ."""
  differ = [path for path in sorted({*found, *wanted}) if found.get(path) != wanted.get(path)]
  lines = []
  for path in differ[:5]:
    there, here = (list(shapes[path]) if path in shapes else "none" for shapes in (found, wanted))
    lines.append(f"  {'/'.join(path)}: checkpoint {there}, model {here}")
  more = [f"  and {len(differ) - 5} more"] if len(differ) > 5 else []
  heading = f"The checkpoint {folder} is not of this run's model: arrays of the decoder differ."
  danger = "MaxText would repeat their values or leave them out. Set the keys of the checkpoint's model."
  return "\n".join([heading, *lines, *more, danger])


def _describe(shapes: Mapping[Path, Shape], config: DerivedKeys) -> str:
  try:
    of_layer = layouts.of_config(config).of_layer
  except ValueError:  # models whose layers are not known
    of_layer = {}
  for values in guess.candidates(shapes, layers=layers_to_choose_from(config) or 0, scan_layers=None, of_layer=of_layer):
    unnamed = {"num_pipeline_repeats": 1, layouts.DCN_STAGES: 1, "param_scan_axis": "unknown"}
    has_pipeline = {"using_pipeline_parallelism": values[layouts.STAGES] > 1}
    return layouts.describe(with_values(config, unnamed | values | has_pipeline))
  return f"{len(shapes)} arrays in decoder"


def _command(folder: str, own_step: int | None, config: DerivedKeys) -> str:
  arguments = "CONFIG key=value ... (the arguments of this run)"
  if sys.argv[1:] and all(re.match(r"\w+=", text) or text.endswith((".yml", ".yaml")) for text in sys.argv[1:]):
    arguments = shlex.join(sys.argv[1:])
  if own_step is None:
    destination, then = f"{folder}-converted", f"give {folder}-converted instead of it"
  else:
    run = f"{config.run_name}-converted"
    destination = os.path.join(config.base_output_directory, run, "checkpoints", str(own_step))
    then = f"go on with run_name={run}"
  return f"maxtext-pp convert {shlex.quote(folder)} {shlex.quote(destination)} {arguments}\nThen {then}."

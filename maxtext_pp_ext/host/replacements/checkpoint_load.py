# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Refuses a checkpoint of another layout before MaxText tries to load it, and says how to convert it.

MaxText loads checkpoints in three ways:

- `load_state_if_possible`, of the pre-trainer, fails if layouts differ: with a list of missing weights, or with
  "Requested shape … is not compatible with the stored shape".
- `from_pretrained`, of the post-trainers, does not fail. It pads an array that is shorter than the model's by repeating
  its values, layer by layer. It leaves out layers that the model has at other paths. It reports nothing
  while the checkpoint lacks at most 80 % of the model's arrays.
- `CheckpointManager.restore_checkpoint`, of the training engine, logs the error and loads nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import contextvars
import dataclasses
import math
import os
import re
import shlex
import sys
from typing import Any

from maxtext_pp_ext.checkpoint import forms, guess
from maxtext_pp_ext.checkpoint.layout import Path, Shape
from maxtext_pp_ext.config.keys import DerivedKeys
from maxtext_pp_ext.config.view import with_values
from maxtext_pp_ext.errors import Refusal

# In names of arrays that from_pretrained leaves at their initial values if a checkpoint lacks them.
_CUSTOM = "custom_linear"
# Names in paths of random state. Older checkpoints of NNX models have it, and MaxText drops it.
_RANDOM_STATE = ("rngs", "to_nnx__rngs", "dropout")
_in_from_pretrained: contextvars.ContextVar[bool] = contextvars.ContextVar("in_from_pretrained", default=False)


class WrongLayoutError(Refusal, ValueError):
  """A checkpoint and this run's model hold layers in different arrays.

  If the checkpoint is of the same model, the message names both layouts and the command that converts it.
  """


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Stored:
  """A model's decoder in a checkpoint.

  Attributes:
    shapes: path -> shape of its parameters, named as in a checkpoint of the trainer; empty if no checkpoint can be read.
    why_not_converted: why `maxtext-pp convert` cannot convert it, and what to do instead; None if it can.
  """

  shapes: Mapping[Path, Shape]
  why_not_converted: str | None = None


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
  """Compares the checkpoint that is about to be loaded with the model that is to get it.

  MaxText itself handles other formats than Orbax's, and checkpoints of other models.

  Args:
    checkpoint_manager: manager of the run's own checkpoints; None if it has none.
    load_parameters_from_path: MaxText's key load_parameters_path, used where the run has no checkpoint.
    load_full_state_from_path: MaxText's key load_full_state_path, used in the same case.
    abstract_unboxed_pre_state: the train state without arrays.
    step: step of the run's own checkpoint; the last one if negative.
    source_checkpoint_layout: format of what is at the paths. "orbax" is compared, "safetensors_dynamic" is refused for a
      model with a pipeline, and others are left to MaxText.
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
  if own_step is None and source_checkpoint_layout == "safetensors_dynamic":
    _refuse_safetensors(folder, config)
  if own_step is None and source_checkpoint_layout != "orbax":
    return
  stored, wanted = _stored(folder), _wanted(abstract_unboxed_pre_state)
  # Another size means another model; MaxText reports the difference.
  if stored.shapes and stored.shapes != wanted and _size(stored.shapes) == _size(wanted):
    raise WrongLayoutError(_message(stored, folder, own_step, config))


@contextlib.contextmanager
def from_pretrained() -> Iterator[None]:
  """Marks the time in which MaxText's from_pretrained runs: it makes a model and loads a checkpoint into it."""
  token = _in_from_pretrained.set(True)
  try:
    yield
  finally:
    _in_from_pretrained.reset(token)


def refuse_other_layouts_within_from_pretrained(config: DerivedKeys, model: Any) -> None:
  """Calls `refuse_other_layouts_of_pretrained` if from_pretrained has made this model."""
  if _in_from_pretrained.get():
    refuse_other_layouts_of_pretrained(config, model)


def refuse_other_layouts_of_pretrained(config: DerivedKeys, model: Any) -> None:
  """Compares the checkpoint that from_pretrained is about to load with the model that is to get it.

  Args:
    config: MaxText's config; its load_parameters_path is loaded.
    model: the abstract model.

  Raises:
    WrongLayoutError: the layouts differ, or one of the two has a pipeline and not all arrays agree. MaxText pads arrays
      for vLLM, so other differences in size are left to it; it pads no model with a pipeline.
  """
  if not config.load_parameters_path:
    return
  from flax import nnx  # pylint: disable=import-outside-toplevel

  folder = _root(config.load_parameters_path)
  stored, wanted = _stored(folder), _wanted(nnx.state(model))
  wanted = {path: s for path, s in wanted.items() if path in stored.shapes or not any(_CUSTOM in part for part in path)}
  found = _fused_as_in(wanted, stored.shapes)
  if not found or _agree(found, wanted):
    return
  if _size(found) == _size(wanted):
    raise WrongLayoutError(_message(stored, folder, None, config))
  if _has_pipeline(found) or _has_pipeline(wanted):
    raise WrongLayoutError(_message_about_arrays(found, wanted, folder))


def refuse_other_layouts_of_engine(manager: Any, model: Any, step: int | None) -> None:
  """Compares a checkpoint of MaxText's training engine with the model that is to get it.

  The engine logs an error of Orbax's, and trains on with the values that the model has (MaxText 0.2.5).

  Args:
    manager: its CheckpointManager.
    model: the model, or an adapter around it.
    step: of the checkpoint; None for the last one.

  Raises:
    WrongLayoutError: the layouts differ, or one of the two has a pipeline and not all arrays agree.
  """
  from flax import nnx  # pylint: disable=import-outside-toplevel

  own = manager._checkpoint_manager  # pylint: disable=protected-access
  step = manager.get_latest_step() if own is not None and step is None else step
  if own is None or step is None:
    return
  folder = os.path.join(str(own.directory), str(step))
  model = getattr(model, "base", model)  # of Tunix's adapter
  stored, wanted = _stored(os.path.join(folder, "model_params")).shapes, _wanted(nnx.state(model))
  if not stored or stored == wanted:
    return
  config = getattr(model, "config", None)
  if config is not None and _size(stored) == _size(wanted):
    other = "Checkpoints of the training engine cannot be converted. Set the keys of the checkpoint's layout."
    raise WrongLayoutError(_message(_Stored(shapes=stored, why_not_converted=other), folder, None, config))
  if _has_pipeline(stored) or _has_pipeline(wanted):
    raise WrongLayoutError(_message_about_arrays(stored, wanted, folder))


def _refuse_safetensors(folder: str, config: DerivedKeys) -> None:
  if not getattr(config, "using_pipeline_parallelism", False):
    return
  from maxtext_pp_ext.host.models import layouts  # pylint: disable=import-outside-toplevel

  raise WrongLayoutError(
      f"source_checkpoint_layout=safetensors_dynamic: MaxText can load {folder} only into a model without a pipeline. "
      f"This run's is: {layouts.describe(config)}.\n"
      "Convert it with maxtext.checkpoint_conversion.to_maxtext, without a pipeline, and then with `maxtext-pp convert` "
      "to this layout; load the result with source_checkpoint_layout=orbax."
  )


def _message(stored: _Stored, folder: str, own_step: int | None, config: DerivedKeys) -> str:
  from maxtext_pp_ext.host.models import layouts  # pylint: disable=import-outside-toplevel

  layouts_of_both = (
      f"The checkpoint {folder} has another layout than this run's model:\n"
      f"  checkpoint: {_describe(stored.shapes, config)}\n"
      f"  this run:   {layouts.describe(config)}\n"
  )
  if stored.why_not_converted:
    return layouts_of_both + stored.why_not_converted
  return (
      f"{layouts_of_both}Convert it, which changes no value and keeps the optimizer's state:\n"
      f"  {_command(folder, own_step, config)}"
  )


def _message_about_arrays(stored: Mapping[Path, Shape], wanted: Mapping[Path, Shape], folder: str) -> str:
  """Returns the message about a checkpoint of another size than the model: it names the arrays that differ."""
  text = lambda shapes, path: list(shapes[path]) if path in shapes else "none"
  differ = [path for path in sorted({*stored, *wanted}) if stored.get(path) != wanted.get(path)]
  lines = [f"  {'/'.join(path)}: checkpoint {text(stored, path)}, model {text(wanted, path)}" for path in differ[:5]]
  more = [f"  and {len(differ) - 5} more"] if len(differ) > 5 else []
  heading = f"The checkpoint {folder} is not of this run's model: arrays of the decoder differ."
  danger = "MaxText would repeat their values or leave them out. Set the keys of the checkpoint's model."
  return "\n".join([heading, *lines, *more, danger])


def _what_is_loaded(manager: Any, load_parameters_path: str, load_full_state_path: str, step: int):
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
  path = load_parameters_path or load_full_state_path
  return (_root(path), None) if path else None


def _root(path: Any) -> str:
  return str(path).rstrip("/").removesuffix("/items")


def _stored(folder: str) -> _Stored:
  """Returns the parameters of the checkpoint's decoder."""
  from etils import epath  # pylint: disable=import-outside-toplevel
  import jax  # pylint: disable=import-outside-toplevel
  import orbax.checkpoint as ocp  # pylint: disable=import-outside-toplevel

  try:
    root = epath.Path(folder)
    items = next(path for path in (root / "items", root) if (path / "_METADATA").exists())
    tree = ocp.PyTreeCheckpointHandler().metadata(items).tree
    leaves = jax.tree_util.tree_leaves_with_path(forms.weights(tree), is_leaf=lambda x: hasattr(x, "shape"))
    shapes = {tuple(str(getattr(k, "key", getattr(k, "idx", k))) for k in path): tuple(x.shape) for path, x in leaves}
    why_not = forms.why_not_converted(tree)
  except Exception:  # pylint: disable=broad-exception-caught
    return _Stored(shapes={})  # left to MaxText
  if not forms.is_of_trainer(tree):
    shapes = {path[:-1] if path[-1] == forms.VALUE else path: shape for path, shape in shapes.items()}
  shapes = {path: shape for path, shape in shapes.items() if not set(path) & set(_RANDOM_STATE)}
  return _Stored(shapes=_of_decoder({(*forms.PARAMETERS, *p): s for p, s in shapes.items()}), why_not_converted=why_not)


def _wanted(abstract_state: Any) -> dict[Path, Shape]:
  """Returns the parameters of the model's decoder, named as in a checkpoint."""
  from flax import nnx  # pylint: disable=import-outside-toplevel

  if not isinstance(abstract_state, nnx.State):
    return {}
  model = abstract_state["model"] if "model" in abstract_state else abstract_state
  params = nnx.to_flat_state(nnx.filter_state(model, nnx.Param))
  shape = lambda leaf: tuple((leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf).shape)
  return _of_decoder({(*forms.PARAMETERS, *map(str, path)): shape(leaf) for path, leaf in params})


def _of_decoder(shapes: Mapping[Path, Shape]) -> dict[Path, Shape]:
  return {path: shape for path, shape in shapes.items() if "decoder" in path}


def _fused_as_in(wanted: Mapping[Path, Shape], stored: Mapping[Path, Shape]) -> Mapping[Path, Shape]:
  """Joins wi_0 and wi_1 of a checkpoint's experts where the model has them in one matrix, as from_pretrained does."""
  fused = dict(stored)
  for path in wanted:
    if path[-1] == "wi" and path not in stored:
      halves = [fused.pop((*path[:-1], name), ()) for name in ("wi_0", "wi_1")]
      if all(halves):
        fused[path] = (*halves[0][:-1], halves[0][-1] + halves[1][-1])
  return fused


def _agree(stored: Mapping[Path, Shape], wanted: Mapping[Path, Shape]) -> bool:
  """Returns whether all shapes are the model's; matrices may be transposed, as from_pretrained allows."""
  return stored.keys() == wanted.keys() and all(
      shape == wanted[path] or (len(shape) == 2 and shape[::-1] == wanted[path]) for path, shape in stored.items()
  )


def _has_pipeline(shapes: Mapping[Path, Shape]) -> bool:
  return any("pipeline_module" in path for path in shapes)


def _size(shapes: Mapping[Path, Shape]) -> int:
  return sum(map(math.prod, shapes.values()))


def _describe(shapes: Mapping[Path, Shape], config: DerivedKeys) -> str:
  from maxtext_pp_ext.host.models import layouts  # pylint: disable=import-outside-toplevel

  for values in guess.candidates(shapes, layers=layouts.layers_of_pipelined_kind(config), scan_layers=None):
    values = {"num_pipeline_repeats": 1, layouts.DCN_STAGES: 1} | values
    values["using_pipeline_parallelism"] = values[layouts.STAGES] > 1
    return layouts.describe(with_values(config, values))
  return f"{len(shapes)} arrays in decoder"


def _command(folder: str, own_step: int | None, config: DerivedKeys) -> str:
  """Returns text that says how to convert the checkpoint and load the result."""
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

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The trees that MaxText saves, and whether a checkpoint has all that its run saves. Only a trainer's can be converted.

- Trainer: `{"params": {"params": weights}, "opt_state": …, "step": …}`, or only its "params".
- Trainer with DiLoCo: `{"inner_state": such a tree per replica, "params": {"params": weights}, "outer_opt_state": …,
  "step": …}`.
- Inference: weights, or `{"base": weights}`, with each array below a "value".
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
import dataclasses
from typing import Any

from maxtext_pp_ext.checkpoint.layout import LayoutError, Path, Shape

PARAMETERS = ("params", "params")
VALUE = "value"
_DILOCO = "inner_state"
_MOST = 10  # arrays that a message names
_OPTIMIZER, _STEP, _OTHERS = "opt_state", "step", ("nnx_aux", "model")
# Names in paths of random state. Older checkpoints of NNX models have it among the weights.
RANDOM_STATE = ("rngs", "to_nnx__rngs", "dropout")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Saved:
  shape: Shape  # Random keys are stored as words along one more axis.
  is_random_state: bool = False  # a random key or counter. MaxText draws a new one if a checkpoint has none.


def is_of_trainer(tree: Mapping[str, Any]) -> bool:
  """Returns whether weights are where MaxText's trainer has them, with DiLoCo or without."""
  return PARAMETERS[1] in tree.get(PARAMETERS[0], ())


def weights(tree: Mapping[str, Any]) -> Any:
  """Returns the part of a checkpoint's tree that has the model's weights; empty for other trees."""
  if is_of_trainer(tree):
    return tree[PARAMETERS[0]][PARAMETERS[1]]
  root = tree.get("base", tree)
  return root if "decoder" in root else {}


def why_not_converted(names: Collection[str]) -> str | None:
  """Returns why a tree with these outermost names cannot be converted, and what to do; None if no reason is known."""
  if _DILOCO in names:
    return (
        f"Checkpoints of DiLoCo cannot be converted: {_DILOCO} holds a state for each replica. Continue in the layout of "
        "the checkpoint. Or convert its weights alone: in that layout, run a step with enable_diloco=False, "
        "learning_rate=0 and load_parameters_path, and convert the checkpoint of that run."
    )
  if PARAMETERS[0] not in names and ("base" in names or "decoder" in names):
    return (
        "Checkpoints for inference cannot be converted: this one has weights only, each array below a name of its own. "
        "Convert the trainer's checkpoint from which it was made, and make it again."
    )
  return None


def check(stored: Mapping[Path, Shape], saved: Mapping[Path, Saved]) -> None:
  """Raises LayoutError if a checkpoint lacks an array of those that its run saves, or has others; the message names them.

  A checkpoint without any state of an optimizer has weights only, as one that was imported. Only parameters have to be
  there, not even the step. Random state may lack, or be left over.
  """
  kinds = (_lacking, _too_much, _of_another_shape)
  if problems := [line for of_kind in kinds for line in listed(of_kind(stored, saved))]:
    raise LayoutError("\n".join(["The checkpoint is not what a run of these arguments saves:", *problems, _HINT]))


def has_optimizer(stored: Mapping[Path, Shape]) -> bool:
  return any(path[0] == _OPTIMIZER for path in stored)


def lacking_of_optimizer(stored: Mapping[Path, Shape], saved: Mapping[Path, Saved]) -> Iterator[str]:
  """A line for each array that the optimizer's state lacks in a checkpoint that has some of that state's arrays."""
  needed = {path: wanted for path, wanted in saved.items() if path[0] in (_OPTIMIZER, _STEP)}
  # Counters may have the same places in states of several optimizers.
  if any(wanted.shape and path in stored for path, wanted in needed.items()):
    yield from _lacking(stored, needed)


_HINT = (
    "If the run that wrote it had another optimizer, or other keys that add state, give these keys with --from, such as "
    "--from opt_type=adamw. Otherwise the checkpoint is damaged."
)


def listed(problems: Iterable[str]) -> list[str]:
  """Returns a line for each problem, up to a limit, and the number of the others."""
  lines = [f"  {text}" for text in problems]
  return lines if len(lines) <= _MOST else [*lines[:_MOST], f"  and {len(lines) - _MOST} more"]


def _lacking(stored: Mapping[Path, Shape], saved: Mapping[Path, Saved]) -> Iterator[str]:
  is_whole = has_optimizer(stored)
  # State of a kind that a checkpoint of weights has at all.
  kinds = {path[-1] for path in stored if path[:1] == _OTHERS[:1]}
  there = {_by_collection(path) for path in stored}
  for path, wanted in saved.items():
    needed = is_whole or path[:2] == PARAMETERS or (path[:2] == _OTHERS and path[-1] in kinds)
    if needed and not wanted.is_random_state and not _places(path) & there:
      yield f"it lacks {'/'.join(path)} {list(wanted.shape)}"


def _too_much(stored: Mapping[Path, Shape], saved: Mapping[Path, Saved]) -> Iterator[str]:
  known = {place for path in saved for place in _places(path)}
  ours = {path[0] for path in saved} | {_OPTIMIZER, _STEP}
  for path, shape in stored.items():
    if path[0] in ours and _by_collection(path) not in known and not set(path) & set(RANDOM_STATE):
      yield f"it has {'/'.join(path)} {list(shape)}, which such a run does not have"


def _of_another_shape(stored: Mapping[Path, Shape], saved: Mapping[Path, Saved]) -> Iterator[str]:
  for path, wanted in saved.items():
    if not wanted.is_random_state and path in stored and stored[path] != wanted.shape:
      yield f"{'/'.join(path)} has the shape {list(stored[path])}, and {list(wanted.shape)} in such a run"


def _by_collection(path: Path) -> Path:
  """The path with the collection of parameters in the place of another one: older checkpoints have some of Linen's."""
  return (*PARAMETERS, *path[2:]) if path[0] == PARAMETERS[0] else path


def _places(path: Path) -> set[Path]:
  """The places where a checkpoint may have an array. Older ones have all variables of a model among its parameters."""
  return {path, (*PARAMETERS, *path[2:])} if path[:2] == _OTHERS else {path}

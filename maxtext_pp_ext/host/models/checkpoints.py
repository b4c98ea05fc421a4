# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The arrays of a checkpoint that is about to be loaded, of the model that is to get them, and what MaxText saves."""

from collections.abc import Iterator, Mapping
import dataclasses
import functools
import math
from typing import Any

from flax import nnx
import jax

from maxtext_pp_ext.checkpoint import complete, places
from maxtext_pp_ext.checkpoint.complete import Saved
from maxtext_pp_ext.checkpoint.layout import Path, Shape
from maxtext_pp_ext.config.view import with_values
from maxtext_pp_ext.host.models import layouts
from maxtext_pp_ext.host.models.run_config import as_value_errors
from maxtext_pp_ext.sharding.variables import key_names

# Keys of the optimizer, on which a layout does not depend. Its config has other values of them.
OF_OPTIMIZER = ("opt_type", "adamw_mask", "trainable_parameters_mask")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stored:
  """The arrays of a checkpoint; none if no checkpoint can be read."""

  # All of them, named as in the checkpoint.
  arrays: Mapping[Path, Shape] = dataclasses.field(default_factory=dict)
  # A model's parameters, named as in a checkpoint of the trainer.
  weights: Mapping[Path, Shape] = dataclasses.field(default_factory=dict)
  # Why `maxtext-pp convert` cannot convert it, and what to do instead; None if it can.
  why_not_converted: str | None = None

  @functools.cached_property
  def shapes(self) -> Mapping[Path, Shape]:
    return of_decoder(self.weights)


def read(folder: str) -> Stored:
  """The arrays of a checkpoint; none if it cannot be read, which is then left to MaxText."""
  from etils import epath  # pylint: disable=import-outside-toplevel
  import orbax.checkpoint as ocp  # pylint: disable=import-outside-toplevel

  try:
    tree = ocp.PyTreeCheckpointHandler().metadata(places.find_items(epath.Path(folder))).tree
    arrays, weights = _shapes(tree), _shapes(complete.weights(tree))
    why_not = complete.why_not_converted(tree)
  except Exception:  # pylint: disable=broad-exception-caught
    return Stored()
  if not complete.is_of_trainer(tree):
    weights = {path[:-1] if path[-1] == complete.VALUE else path: shape for path, shape in weights.items()}
  # MaxText drops random state of older checkpoints of NNX models.
  kept = {path: shape for path, shape in weights.items() if not set(path) & set(complete.RANDOM_STATE)}
  weights = {(*complete.PARAMETERS, *path): shape for path, shape in kept.items()}
  return Stored(arrays=arrays, weights=weights, why_not_converted=why_not)


def _shapes(tree: Any) -> dict[Path, Shape]:
  leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: hasattr(x, "shape"))
  return {key_names(path): tuple(leaf.shape) for path, leaf in leaves if hasattr(leaf, "shape")}


def of_model(abstract_state: Any) -> dict[Path, Shape]:
  """The parameters of a model, or of a train state, named as in a checkpoint of the trainer; {} for anything else."""
  if not isinstance(abstract_state, nnx.State):
    return {}
  model = abstract_state["model"] if "model" in abstract_state else abstract_state
  params = nnx.to_flat_state(nnx.filter_state(model, nnx.Param))
  values = ((path, leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf) for path, leaf in params)
  return {(*complete.PARAMETERS, *map(str, path)): tuple(value.shape) for path, value in values}


def of_decoder(shapes: Mapping[Path, Shape]) -> dict[Path, Shape]:
  return {path: shape for path, shape in shapes.items() if "decoder" in path}


def fused_as_in(wanted: Mapping[Path, Shape], stored: Mapping[Path, Shape]) -> Mapping[Path, Shape]:
  """Joins wi_0 and wi_1 of a checkpoint's experts where the model has them in one matrix, as from_pretrained does."""
  fused = dict(stored)
  for path in wanted:
    if path[-1] == "wi" and path not in stored:
      halves = [fused.pop((*path[:-1], name), ()) for name in ("wi_0", "wi_1")]
      if all(halves):
        fused[path] = (*halves[0][:-1], halves[0][-1] + halves[1][-1])
  return fused


def agree(stored: Mapping[Path, Shape], wanted: Mapping[Path, Shape]) -> bool:
  """Whether all shapes are the model's; matrices may be transposed, as from_pretrained allows."""
  return stored.keys() == wanted.keys() and all(
      shape == wanted[path] or (len(shape) == 2 and shape[::-1] == wanted[path]) for path, shape in stored.items()
  )


def size(shapes: Mapping[Path, Shape]) -> int:
  return sum(map(math.prod, shapes.values()))


def lacking(stored: Mapping[Path, Shape], wanted: Mapping[Path, Shape]) -> Iterator[str]:
  """A line for each array that a checkpoint lacks, and, if there is one, for each that it has instead."""
  found = [f"it lacks {'/'.join(path)} {list(shape)}" for path, shape in sorted(wanted.items()) if path not in stored]
  yield from found
  for path, shape in sorted(stored.items()) if found else ():
    if path not in wanted:
      yield f"it has {'/'.join(path)} {list(shape)}, which the model does not have"


def train_state(config: Any, given: Mapping[str, Any]) -> Any:
  """A run's `TrainStateNNX` without arrays, for a config of `config_of_layout`. Raises ValueError if it can have none."""
  from maxtext.common import train_state_nnx  # pylint: disable=import-outside-toplevel
  from maxtext.optimizers import optimizers  # pylint: disable=import-outside-toplevel

  config = with_values(config, {key: given[key] for key in OF_OPTIMIZER if key in given})
  model = layouts.abstract_model_of(config)
  with as_value_errors("make this optimizer"):
    optimizer = optimizers.get_optimizer(config, lambda step: 0.0, model, mesh=model.mesh)
    create = lambda model: train_state_nnx.TrainStateNNX(model, nnx.Optimizer(model, optimizer, wrt=nnx.Param))
    return nnx.state(nnx.eval_shape(create, model))


def by_state(state: Any) -> dict[Path, Saved]:
  """What MaxText saves of a train state, which may be without arrays."""
  from maxtext.common import train_state_nnx  # pylint: disable=import-outside-toplevel

  random = {("nnx_aux", *map(str, path)) for path, _ in nnx.to_flat_state(nnx.filter_state(state, nnx.RngState))}
  leaves = jax.tree_util.tree_leaves_with_path(train_state_nnx.to_checkpoint_dict(state))
  found = ((key_names(keys), tuple(leaf.shape)) for keys, leaf in leaves)
  return {path: Saved(shape=shape, is_random_state=path in random) for path, shape in found}

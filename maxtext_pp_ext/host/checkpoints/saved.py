# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The arrays that MaxText's trainer saves, read off its own train state, built without arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flax import nnx
import jax

from maxtext_pp_ext.checkpoint.complete import Saved
from maxtext_pp_ext.checkpoint.layout import Path
from maxtext_pp_ext.config.view import with_values
from maxtext_pp_ext.host.checkpoints.stored import names
from maxtext_pp_ext.host.models import layouts
from maxtext_pp_ext.host.models.refusals import as_value_errors

# Keys of the optimizer, on which a layout does not depend. Its config has other values of them.
OF_OPTIMIZER = ("opt_type", "adamw_mask", "trainable_parameters_mask")


def train_state(config: Any, given: Mapping[str, Any]) -> Any:
  """The state of a run's `TrainStateNNX`, without arrays, for a config of `layouts.config_of_layout` and the run's keys.

  Raises ValueError if MaxText cannot make the optimizer for this model.
  """
  from maxtext.common import train_state_nnx  # pylint: disable=import-outside-toplevel
  from maxtext.optimizers import optimizers  # pylint: disable=import-outside-toplevel

  config = with_values(config, {key: given[key] for key in OF_OPTIMIZER if key in given})
  model = layouts.abstract_model_of(config)

  def create(model: Any) -> Any:
    return train_state_nnx.TrainStateNNX(model, nnx.Optimizer(model, optimizer, wrt=nnx.Param))

  with as_value_errors("make this optimizer"):
    optimizer = optimizers.get_optimizer(config, lambda step: 0.0, model, mesh=model.mesh)
    return nnx.state(nnx.eval_shape(create, model))


def by_state(state: Any) -> dict[Path, Saved]:
  """What MaxText saves of a train state, which may be without arrays."""
  from maxtext.common import train_state_nnx  # pylint: disable=import-outside-toplevel

  random = {("nnx_aux", *map(str, path)) for path, _ in nnx.to_flat_state(nnx.filter_state(state, nnx.RngState))}
  found = {}
  for keys, leaf in jax.tree_util.tree_leaves_with_path(train_state_nnx.to_checkpoint_dict(state)):
    path = names(keys)
    found[path] = Saved(shape=tuple(leaf.shape), is_random_state=path in random)
  return found

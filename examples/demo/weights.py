# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Gives runs with and without a pipeline the same weights: MaxText draws them once, and each run gets them in its layout.

MaxText draws different numbers for a pipelined model than for the same model without a pipeline, so a shared seed is not
enough. Runs load their checkpoint with MaxText's own key, `load_parameters_path`.
"""

from collections.abc import Sequence
import pathlib
from typing import Any

from flax import nnx, traverse_util
from flax.core.spmd import logical_axis_rules
import jax
from jax.experimental import multihost_utils
from maxtext.common import checkpointing
from maxtext.configs import pyconfig
from maxtext.utils import maxtext_utils, model_creation_utils
import numpy as np

from maxtext_pp_ext.checkpoint.layout import Layout
from maxtext_pp_ext.checkpoint.moves import converted
from maxtext_pp_ext.host.models import layouts

Tree = dict[str, Any]


def draw(argv: Sequence[str]) -> tuple[Tree, Layout]:
  """Returns parameters as MaxText initialises them for a config, and the layout of the layers.

  The numbers do not depend on what ran before in this process: MaxText's trainers change the generator for all that
  follows.
  """
  config = pyconfig.initialize(list(argv))
  mesh = maxtext_utils.get_mesh_from_config(config)
  create_model, _ = model_creation_utils.create_nnx_abstract_model(config, mesh)
  threefry = jax.default_prng_impl("threefry2x32")
  with jax.set_mesh(mesh), logical_axis_rules(config.logical_axis_rules), threefry:
    drawn = jax.jit(lambda: nnx.state(create_model(), nnx.Param))()
  whole = multihost_utils.process_allgather(nnx.to_pure_dict(drawn), tiled=True)
  return jax.tree.map(np.asarray, whole), layouts.of_config(config)


def in_layout_of(tree: Tree, layout: Layout, argv: Sequence[str]) -> Tree:
  """Parameters that have this layout in that of the model of `argv`. Raises LayoutError if that is another model."""
  wanted = layouts.of_config(pyconfig.initialize(list(argv)))
  return traverse_util.unflatten_dict(converted(traverse_util.flatten_dict(tree), layout, wanted))


def save(path: pathlib.Path, tree: Tree) -> None:
  """Writes a checkpoint of parameters; a run then has `load_parameters_path` = path/items."""
  # The outer `params` is added by MaxText; the inner one is the collection that it looks for in the file.
  checkpointing.save_params_to_path(str(path), {"params": tree})

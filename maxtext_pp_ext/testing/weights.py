# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The same weights for runs with and without a pipeline: drawn once by MaxText, and carried into each run's layout.

MaxText draws other numbers for a pipelined model than for the same model without a pipeline, so a shared seed is not
enough. Runs load their checkpoint with MaxText's own key, `load_parameters_path`.
"""

from collections.abc import Sequence
import dataclasses
import pathlib
from typing import Any

import jax
import numpy as np

Tree = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weights:
  """Parameters of a model without a pipeline, its layers stacked along `scan_axis` in `decoder/layers`."""

  tree: Tree
  scan_axis: int

  @property
  def size(self) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(self.tree))


@dataclasses.dataclass(frozen=True, kw_only=True)
class PipelineLayout:
  """How MaxText stacks the layers of a pipeline; symbols as in `schedule`, P layers per stage."""

  stages: int
  layers_per_stage: int = 1
  scan_layers_per_stage: bool = False


def draw(argv: Sequence[str]) -> Weights:
  """Weights as MaxText initialises them for a config without a pipeline."""
  from flax import nnx  # pylint: disable=import-outside-toplevel
  from flax.core.spmd import logical_axis_rules  # pylint: disable=import-outside-toplevel
  from maxtext.configs import pyconfig  # pylint: disable=import-outside-toplevel
  from maxtext.utils import maxtext_utils, model_creation_utils  # pylint: disable=import-outside-toplevel

  config = pyconfig.initialize(list(argv))
  mesh = maxtext_utils.get_mesh_from_config(config)
  create_model, _ = model_creation_utils.create_nnx_abstract_model(config, mesh)
  with jax.set_mesh(mesh), logical_axis_rules(config.logical_axis_rules):
    drawn = jax.jit(lambda: nnx.state(create_model(), nnx.Param))()
  return Weights(tree=jax.tree.map(np.asarray, nnx.to_pure_dict(drawn)), scan_axis=config.param_scan_axis)


def moved(weights: Weights, fraction: float, seed: int = 0) -> Weights:
  """Each weight moved by this fraction of itself, up or down at random."""
  if fraction == 0:
    return weights
  random = np.random.default_rng(seed)
  move = lambda leaf: (leaf * (1 + fraction * random.choice([-1.0, 1.0], leaf.shape))).astype(leaf.dtype)
  return dataclasses.replace(weights, tree=jax.tree.map(move, weights.tree))


def in_layout_of(weights: Weights, argv: Sequence[str]) -> Tree:
  """The parameters as the model of MaxText's arguments `argv` has them, in a pipeline or not."""
  from maxtext.configs import pyconfig  # pylint: disable=import-outside-toplevel

  config = pyconfig.initialize(list(argv))
  if not config.using_pipeline_parallelism:
    return weights.tree
  layout = PipelineLayout(
      stages=config.ici_pipeline_parallelism * config.dcn_pipeline_parallelism,
      layers_per_stage=config.num_layers_per_pipeline_stage,
      scan_layers_per_stage=config.scan_layers_per_stage,
  )
  return to_pipeline_layout(weights, layout)


def to_pipeline_layout(weights: Weights, layout: PipelineLayout) -> Tree:
  """Moves a decoder's stacked layers to where the host's pipelines, and ours, keep them.

  `decoder/layers/…`, shape `[…, layer, …]` with the layer at `scan_axis`, becomes `decoder/pipeline_module/layers/…`,
  shape `[repeat, stage, …]`, with layer = (repeat · S + stage) · P + index within the stage. Several layers of a stage
  are `layers_0/…`, `layers_1/…`, or `scanned_layers/…` with the index at `scan_axis` of what follows the stage. A
  pipeline without repeats has no first axis. Layers outside the pipeline are not covered.

  Raises:
    ValueError: if stages and layers per stage do not divide the layers.
  """
  scan_axis = weights.scan_axis
  # Behind [repeat, stage], or [stage] where there is one repeat.
  index_axis = lambda stacked: 2 if stacked.shape[scan_axis] > layout.stages * layout.layers_per_stage else 1

  def layer_of_stages(stacked: np.ndarray, index: int) -> np.ndarray:
    split = _split(stacked, scan_axis, layout)
    return np.ascontiguousarray(np.take(split, index, axis=index_axis(stacked)))

  def scanned_layers_of_stages(stacked: np.ndarray) -> np.ndarray:
    at = index_axis(stacked)
    return np.ascontiguousarray(np.moveaxis(_split(stacked, scan_axis, layout), at, at + scan_axis))

  decoder = dict(weights.tree["decoder"])
  layers = decoder.pop("layers")
  if layout.layers_per_stage == 1:
    stages = jax.tree.map(lambda w: layer_of_stages(w, 0), layers)
  elif layout.scan_layers_per_stage:
    stages = {"scanned_layers": jax.tree.map(scanned_layers_of_stages, layers)}
  else:
    stages = {
        f"layers_{index}": jax.tree.map(lambda w, index=index: layer_of_stages(w, index), layers)
        for index in range(layout.layers_per_stage)
    }
  return weights.tree | {"decoder": decoder | {"pipeline_module": {"layers": stages}}}


def _split(stacked: np.ndarray, scan_axis: int, layout: PipelineLayout) -> np.ndarray:
  """[…, layer, …] -> [repeat, stage, layer of the stage, …], without the first axis where there is one repeat."""
  layers_first = np.moveaxis(stacked, scan_axis, 0)
  layers, group = layers_first.shape[0], layout.stages * layout.layers_per_stage
  if layers % group:
    raise ValueError(
        f"{layers} layers cannot be divided among {layout.stages} stages of {layout.layers_per_stage} layers each."
    )
  leading = (layers // group, layout.stages) if layers > group else (layout.stages,)
  return layers_first.reshape(*leading, layout.layers_per_stage, *layers_first.shape[1:])


def save(path: pathlib.Path, tree: Tree) -> None:
  """Writes a checkpoint of parameters; `trainer.parameters_path(path)` is what a run then loads."""
  from maxtext.common import checkpointing  # pylint: disable=import-outside-toplevel

  # The outer `params` is added by MaxText; the inner one is the collection it looks for in the file.
  checkpointing.save_params_to_path(str(path), {"params": tree})

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Initial weights for both runs: drawn once by MaxText without a pipeline, saved in either run's layout.

MaxText draws other numbers for a pipelined model than for the same model without a pipeline, so a shared seed is not
enough. Both runs load their checkpoint with MaxText's own key, `load_parameters_path`.
"""

from typing import Any

import jax
import numpy as np

from maxtext_pp_ext.demo import settings as demo_settings

Weights = dict[str, Any]


def write_initial_weights(settings: demo_settings.Settings) -> int:
  """Saves the same weights twice: layout `sequential` and layout `pipelined`. Returns the number of parameters."""
  from maxtext.common import checkpointing  # pylint: disable=import-outside-toplevel

  sequential, scan_axis = _draw(settings)
  pipelined = to_pipeline_layout(sequential, demo_settings.STAGES, scan_axis)
  for layout, weights in {"sequential": sequential, "pipelined": pipelined}.items():
    # The outer `params` is added by MaxText; the inner one is the collection it looks for in the file.
    checkpointing.save_params_to_path(str(settings.weights(layout)), {"params": weights})
  return sum(leaf.size for leaf in jax.tree.leaves(sequential))


def _draw(settings: demo_settings.Settings) -> tuple[Weights, int]:
  """Weights as MaxText initialises them without a pipeline, and the axis along which it stacks layers."""
  from flax import nnx  # pylint: disable=import-outside-toplevel
  from flax.core.spmd import logical_axis_rules  # pylint: disable=import-outside-toplevel
  from maxtext.configs import pyconfig  # pylint: disable=import-outside-toplevel
  from maxtext.utils import maxtext_utils, model_creation_utils  # pylint: disable=import-outside-toplevel

  base = demo_settings.maxtext_folder() / "configs" / "base.yml"
  config = pyconfig.initialize(
      ["demo", str(base), "run_name=initial-weights", *settings.shared_keys(), *settings.sequential_keys()]
  )
  mesh = maxtext_utils.get_mesh_from_config(config)
  create_model, _ = model_creation_utils.create_nnx_abstract_model(config, mesh)
  with jax.set_mesh(mesh), logical_axis_rules(config.logical_axis_rules):
    drawn = jax.jit(lambda: nnx.state(create_model(), nnx.Param))()
  return jax.tree.map(np.asarray, nnx.to_pure_dict(drawn)), config.param_scan_axis


def to_pipeline_layout(sequential: Weights, stages: int, scan_axis: int) -> Weights:
  """Moves a decoder's stacked layers to where the host's pipeline keeps them.

  `decoder/layers/…`, shape `[…, layer, …]` with the layer at `scan_axis`, becomes
  `decoder/pipeline_module/layers/…`, shape `[repeat, stage, …]`, with layer = repeat · stages + stage. A pipeline
  without repeats has no first axis; layers per stage other than 1 are not covered.
  """

  def to_repeats_and_stages(stacked: np.ndarray) -> np.ndarray:
    layers_first = np.moveaxis(stacked, scan_axis, 0)
    layers = layers_first.shape[0]
    if layers % stages:
      raise ValueError(f"{layers} layers cannot be divided among {stages} stages.")
    repeats = layers // stages
    leading = (repeats, stages) if repeats > 1 else (stages,)
    return np.ascontiguousarray(layers_first.reshape(*leading, *layers_first.shape[1:]))

  decoder = dict(sequential["decoder"])
  layers = decoder.pop("layers")
  return sequential | {"decoder": decoder | {"pipeline_module": {"layers": jax.tree.map(to_repeats_and_stages, layers)}}}

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Every decoder block, in every layout of its layers, gets as far as a gradient, or is refused by its config.

No array is made: models and their train steps are traced. Values are compared elsewhere, in fewer layouts.
"""

import itertools

from flax import linen as nn
from flax import nnx
import jax
from maxtext.common.common_types import DecoderBlockType
from maxtext.trainers.pre_train import train
from maxtext.utils import maxtext_utils, model_creation_utils
import pytest

from maxtext_pp_ext.config import PipelineConfigError
from maxtext_pp_ext.pipelines import stages
from tests.marks import slow_but
from tests.parity import windows
from tests.parity.blocks import PIPELINED, REFUSED, WINDOWED
from tests.parity.common import make_config

STAGES = 2
# Layers per stage (of cycles: cycles), and whether a stage scans over them.
OF_A_STAGE = {"one layer": (1, False), "layers in turn": (2, False), "layers in a scan": (2, True)}
PIPELINES = {f"{case.name}, {kind}": (case, *of) for case in [*PIPELINED, *REFUSED] for kind, of in OF_A_STAGE.items()}
WINDOWS = {case.name: case for case in [*PIPELINED, *WINDOWED]}
QUICK = ["simple_mlp, layers in a scan"]  # of which MaxText notes the mesh in the parameters


def traced(config):
  """The types of the gradients of MaxText's loss; set-up is that of MaxText's trainers."""
  mesh = maxtext_utils.get_mesh_from_config(config)
  _, abstract = model_creation_utils.create_nnx_abstract_model(config, mesh)
  graphdef, params, rest = nnx.split(abstract, stages.Differentiated, ...)

  def loss(params, rest, data):
    return train.loss_fn(nnx.merge(graphdef, params, rest, copy=True), config, dict(data), None, None)[0]

  data = jax.eval_shape(lambda: windows.batch(config))
  with jax.set_mesh(mesh), nn.logical_axis_rules(config.logical_axis_rules):
    return jax.eval_shape(jax.grad(loss), params, rest, data)


def failures(layouts, make):
  """What was neither traced nor refused, by layout; `make` makes a layout's config."""
  found = {}
  for layout in layouts:
    try:
      traced(make(*layout))
    except PipelineConfigError as error:
      assert "set" in str(error).lower()
    except Exception as error:  # pylint: disable=broad-except
      found[layout] = f"{type(error).__name__}: {error}"
  return found


@pytest.mark.parametrize("case, per_stage, scanned", slow_but(QUICK, PIPELINES, spread=True))
def test_a_pipeline_of_any_layout_is_set_up_or_refused(case, per_stage, scanned):

  def make(repeats, outside, axis):
    inside = STAGES * repeats * per_stage * case.cycle
    return make_config(
        stages=STAGES,
        repeats=repeats,
        microbatches=STAGES,
        layers_per_stage=per_stage * case.cycle,
        scan_layers_per_stage=scanned,
        param_scan_axis=axis,
        decoder_block=case.block,
        pipeline_parallel_layers=inside if outside else -1,
        base_num_decoder_layers=inside + outside * case.cycle + case.keys.get("first_num_dense_layers", 0),
        **case.keys,
    )

  # Repeats, layers outside of the pipeline, param_scan_axis.
  assert failures(itertools.product((1, 2), (0, 2), (0, 1)), make) == {}


@pytest.mark.parametrize("case", slow_but([], WINDOWS))
def test_a_window_over_any_layout_is_set_up_or_refused(case):

  def make(rest, axis, microbatches):
    outside = sum(case.keys.get(key, 0) for key in ("first_num_dense_layers", "first_num_hash_layers"))
    return windows.make_config(
        layers=outside + 2 * case.cycle + rest,
        param_scan_axis=axis,
        num_pipeline_microbatches=microbatches,
        decoder_block=case.block,
        pipeline_impl="circular_bsw",
        **case.keys,
    )

  # Layers that fill no block of a cycle, which MaxText itself refuses of these blocks; param_scan_axis; microbatches.
  rests = (0,) if case.block in ("llama4", "envy") else (0, 1)
  assert failures(itertools.product(rests, (0, 1), (-1, 2)), make) == {}


def test_all_blocks_of_maxtext_are_tried():
  blocks = {case.block for case, *_ in PIPELINES.values()} | {case.block for case in WINDOWS.values()}
  assert blocks == {block.value for block in DecoderBlockType}

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""DeepSeek's MoE layers with the batch-split schedule compute the same in a pipeline as without schedule and pipeline."""

from flax import linen as nn
import jax
import pytest

from maxtext_pp_ext.config.view import ConfigView
from maxtext_pp_ext.host.models import decoder_layers
from maxtext_pp_ext.testing import parity
from tests.engine.common import primitives
from tests.parity.blocks import IMPLEMENTATIONS
from tests.parity.common import make_config
from tests.parity.test_expert_bias import check, DEEPSEEK

LAYER = DEEPSEEK | {"routed_bias_update_rate": 0.0}
TILED = ("batch_seq", "embed_dim", "mlp_dim")
SCHEDULE = {"use_batch_split_schedule": True, "batch_split_factor": 2}
# Of the grouped matrix multiplication, which is interpreted on CPUs.
TILES = {f"{w}_tile_{kind}_{dim}": 8 for w in ("wi", "wo") for kind in ("fwd", "dlhs", "drhs") for dim in TILED}
# name: stages, and keys
LAYOUTS = {
    "3 stages": (3, {}),
    "several layers in a scan": (2, {"layers_per_stage": 2, "scan_layers_per_stage": True}),
    "several layers": (2, {"layers_per_stage": 2}),
    "four parts": (2, {"batch_split_factor": 4}),
    "dropless experts": (2, {"sparse_matmul": True}),
    "megablox": (2, {"sparse_matmul": True, "megablox": True, **TILES}),
    # Not dropless, for which XLA:CPU has no ragged all-to-all.
    "experts on several devices": (2, {"ici_expert_parallelism": 2}),
    "weights and batch on several devices": (2, {"ici_fsdp_parallelism": 4}),
}


@pytest.mark.slow
@pytest.mark.parametrize("stages, keys", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_layers_equal_a_loop_over_layers_without_the_schedule(stages, keys):
  layers = DEEPSEEK["first_num_dense_layers"] + stages * 2 * keys.get("layers_per_stage", 1)
  config = make_config(
      stages=stages,
      repeats=2,
      **({"microbatches": stages, "microbatch_size": 8} | LAYER | {"base_num_decoder_layers": layers} | SCHEDULE | keys),
  )
  mesh, batch = parity.mesh_of(config), parity.Batch.random(config)
  plain = ConfigView(config, (("use_batch_split_schedule", False),))
  for implementation in IMPLEMENTATIONS:
    pipeline = decoder_layers.pipeline(config, mesh, implementation, None)
    expected = parity.reference(pipeline, None, plain, batch)
    parity.compare(pipeline, expected, batch, mesh, config.logical_axis_rules).check(parity.tolerance(config))


def operations(**keys):
  """How often each operation is in the program of a pipeline's forward pass."""
  sizes = {"stages": 2, "repeats": 1, "microbatches": 2, "microbatch_size": 8, "base_num_decoder_layers": 3}
  config = make_config(**(sizes | LAYER | keys))
  mesh, batch = parity.mesh_of(config), parity.Batch.random(config)
  run, params = parity.function_of(decoder_layers.pipeline(config, mesh, "circular_bsw", None))
  with jax.set_mesh(mesh), nn.logical_axis_rules(config.logical_axis_rules):
    jaxpr = jax.make_jaxpr(run)(params, batch.inputs, batch.segment_ids, batch.positions)
  return primitives(jaxpr.jaxpr)


def test_everything_is_multiplied_in_parts():
  without = operations()["dot_general"]
  assert operations(**SCHEDULE | {"batch_split_factor": 4})["dot_general"] == 4 * without > 0


@pytest.mark.slow
def test_megablox_multiplies_groups_with_its_kernel_where_it_is_asked_to():
  _, keys = LAYOUTS["megablox"]
  assert operations(**SCHEDULE, **keys)["pallas_call"] >= 3 * SCHEDULE["batch_split_factor"]
  assert operations(**SCHEDULE, **LAYOUTS["dropless experts"][1])["pallas_call"] == 0


@pytest.mark.slow
def test_maxtexts_train_step_gives_a_model_with_the_schedule_what_it_gives_a_plain_one():
  check(stages=2, repeats=2, microbatches=4, **SCHEDULE)


@pytest.mark.slow
def test_maxtexts_train_step_takes_the_schedule_with_layers_outside_the_pipeline():
  check(stages=2, repeats=2, microbatches=4, outside=2, routed_bias_update_rate=0.0, **SCHEDULE)

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""What backward computes again and keeps, and how weights are stored, by the keys of a run."""

import types
from typing import Any

from jax.sharding import PartitionSpec as P
import pytest

from maxtext_pp_ext.hardware import tiles
from maxtext_pp_ext.host.models import abstract_model, run_config
from maxtext_pp_ext.plan import quantities, weights
from maxtext_pp_ext.schedule import CircularSchedule

KEYS: dict[str, Any] = {
    "decoder_block": "llama2",
    "use_post_ffw_norm": False,
    "num_experts": 1,
    "sparse_matmul": True,
    "scan_layers": True,
    "num_decoder_layers": 48,
    "inhomogeneous_layer_cycle_interval": 1,
    "num_layers_per_pipeline_stage": 4,
    "remat_policy": "full",
    "decoder_layer_input": "device",
}
LLAMA4 = {
    "decoder_block": "llama4",
    "num_experts": 16,
    "inhomogeneous_layer_cycle_interval": 4,
    "nope_layer_interval": 4,
    "interleave_moe_layer_step": 1,
}
PIPELINE = CircularSchedule(stages=4, microbatches=8, repeats=3)
WINDOW = CircularSchedule(stages=1, microbatches=1, repeats=12)


@pytest.mark.parametrize(
    "more, schedule, share",
    [
        ({}, PIPELINE, 1),
        ({}, WINDOW, 1),
        ({}, None, 1),
        ({"use_post_ffw_norm": True}, PIPELINE, 0),  # the norm reads the MLP's output
        ({"decoder_block": "mixtral", "num_experts": 8}, PIPELINE, 0),  # router weights multiply the experts' outputs
        (LLAMA4, PIPELINE, 1),  # and here their inputs; a pipeline saves the input of each layer
        (LLAMA4, WINDOW, 1 / 4),  # a cycle's layers but for the last have a layer behind them
        (LLAMA4, None, 1 / 4),
        (LLAMA4 | {"remat_policy": "custom", "decoder_layer_input": "remat"}, PIPELINE, 1 / 4),
    ],
)
def test_the_last_product_of_a_layer_is_not_recomputed_where_nothing_reads_it(more, schedule, share):
  assert quantities._share_spared(types.SimpleNamespace(**KEYS | more), schedule) == share


def test_a_stage_keeps_the_input_of_each_of_its_layers_and_a_cycle_that_of_its_first():
  kept = lambda schedule, **more: quantities._inputs_of_stage(types.SimpleNamespace(**KEYS | more), schedule)
  assert [kept(each) for each in (PIPELINE, WINDOW, None)] == [4, 1, 1]
  assert kept(PIPELINE, remat_policy="custom") == 4
  assert kept(PIPELINE, remat_policy="custom", decoder_layer_input="remat") == 1


@pytest.mark.parametrize(
    "shape, spec, kept, filled",
    [
        ((16, 8192, 5120), P("expert", None, "fsdp"), {"expert"}, False),  # 320 of 5120
        ((16, 8192, 4096), P("expert", None, "fsdp"), {"expert"}, True),  # 256 of 4096
        ((16, 5120, 8192), P("expert", "fsdp", None), {"expert"}, True),
        ((16, 5120), P("expert"), {"expert"}, True),
        ((5120, 320), P(None, "tensor"), {"tensor"}, True),  # nothing is gathered along it
        ((), P(), set(), True),
    ],
)
def test_shards_that_are_no_multiple_of_the_lanes_are_stored_with_another_axis_in_them(shape, spec, kept, filled):
  assert weights.fills({1: tiles.LANES}, shape, spec, kept, {"expert": 4, "fsdp": 16, "tensor": 4}) is filled


@pytest.mark.parametrize("model", ["llama3-8b", "mixtral-8x7b"])
@pytest.mark.parametrize("remat_policy", ["full", "minimal"])
def test_work_divides_maxtexts_flops_into_attention_experts_and_the_products_of_the_other_weights(model, remat_policy):
  config = run_config.read_without_run(
      [
          *(f"model_name={model}", "compile_topology=v5p-64", "per_device_batch_size=2", "max_target_length=2048"),
          *("ici_pipeline_parallelism=4", "ici_fsdp_parallelism=8", "num_pipeline_microbatches=8"),
          *("pipeline_impl=circular_bsw", f"remat_policy={remat_policy}", "dataset_type=synthetic"),
      ]
  )
  parameters, mesh = abstract_model.explained(config)
  schedule = run_config.schedule_of(config)
  sizes = quantities.sizes(config, schedule, weights.Weights(config, parameters, mesh))
  work = quantities.work(config, schedule, sizes, mesh)
  tokens, embed = 2 * 2048, config.emb_dim
  heads, kv_heads = config.num_query_heads * config.head_dim, config.num_kv_heads * config.head_dim
  again = remat_policy == "full"
  # Forward, and twice as much backward; recomputed without the last product of dense layers.
  projections = (3 + again) * embed * (2 * heads + 2 * kv_heads)
  if model == "llama3-8b":
    of_mlp, of_experts = (9 + 2 * again) * embed * config.mlp_dim, 0
  else:
    of_mlp, of_experts = (3 + again) * embed * config.num_experts, (9 + 3 * again) * 2 * embed * config.mlp_dim
  per_layer = 2 * tokens * config.num_decoder_layers
  assert work.products == pytest.approx(per_layer * (projections + of_mlp), rel=1e-3)
  assert work.grouped == pytest.approx(per_layer * of_experts, rel=1e-3)
  assert work.recomputed == again


@pytest.mark.parametrize(
    "shape, spec, by_reduce_scatter",
    [
        ((16, 48, 8192, 5120), P("expert", None, None, "fsdp"), False),  # 320 of 5120
        ((16, 48, 5120, 8192), P("expert", None, "fsdp", None), True),
        ((8, 32, 14336, 8192), P("expert", None, None, "fsdp"), True),  # 512 of 8192
        ((128, 36, 2880, 2880), P("expert", None, "fsdp", None), False),  # 180 of 2880
        ((4096,), P("fsdp"), True),
        ((), P(), True),
    ],
)
def test_xla_scatters_gradients_whose_shards_fill_tiles(shape, spec, by_reduce_scatter):
  assert weights.fills(tiles.REDUCE_SCATTERED, shape, spec, {"expert"}, {"expert": 4, "fsdp": 16}) is by_reduce_scatter

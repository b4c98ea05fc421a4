# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""What is computed again, and how weights are stored, by the keys of a run."""

import collections
import dataclasses

from jax.sharding import PartitionSpec as P
import pytest

from maxtext_pp_ext.hardware import tiles
from maxtext_pp_ext.host import topology
from maxtext_pp_ext.host.models import abstract_model, flops, run_config
from maxtext_pp_ext.plan import quantities, weights
from maxtext_pp_ext.plan.blocks import Again
from maxtext_pp_ext.plan.layers import kept_by, layers_of


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
  of = quantities.Quantities(config, schedule, weights.Weights(config, parameters, mesh))
  layers = layers_of(config)
  kept = kept_by(config, schedule, layers)
  counted = flops.of_step(config), flops.of_attention(config)
  work = of.work(of.keeping(kept, layers), kept, layers, counted)
  tokens, embed = 2 * 2048, config.emb_dim
  heads, kv_heads = config.num_query_heads * config.head_dim, config.num_kv_heads * config.head_dim
  again = remat_policy == "full"
  # Forward, and twice as much backward; recomputed without the last product of dense layers.
  projections = (3 + again) * embed * (2 * heads + 2 * kv_heads)
  if model == "llama3-8b":
    of_mlp, of_experts = (9 + 2 * again) * embed * config.mlp_dim, 0
  else:
    # `minimal` keeps two of the three products of an expert (maxtext 0.2.5: the name mlpwi_1 is not in moe.py).
    of_mlp = (3 + again) * embed * config.num_experts
    of_experts = (9 + 3 * again + (1 - again)) * 2 * embed * config.mlp_dim
  per_layer = 2 * tokens * config.num_decoder_layers
  assert work.products == pytest.approx(per_layer * (projections + of_mlp), rel=1e-3)
  assert work.grouped == pytest.approx(per_layer * of_experts, rel=1e-3)
  assert work.recomputed == 1  # neither keeps what the kernel of attention returns


def test_kept_results_of_kernels_are_copied_and_those_of_products_by_maxtexts_own_loop_only():
  config = run_config.read_without_run(
      [
          *("model_name=llama3-8b", "compile_topology=v5p-32", "ici_fsdp_parallelism=-1", "dataset_type=synthetic"),
          *("pipeline_impl=circular_bsw", "remat_policy=minimal_with_context", "max_target_length=2048"),
      ]
  )
  parameters, mesh = abstract_model.explained(config)
  layers, window = layers_of(config), run_config.schedule_of(config)
  kept = kept_by(config, window, layers)
  of_tokens = lambda kind: 4 * config.per_device_batch_size * 2048 * layers.kept_at_most(kind)

  def copies(schedule, kind):
    """What is read and written more if backward gets all results of a kind."""
    of = quantities.Quantities(config, schedule, weights.Weights(config, parameters, mesh))
    values = lambda share: of.work(of.sizes, with_share(kind, share), layers, (1e15, 1e14)).elementwise
    return values(1.0) - values(0.0)

  with_share = lambda kind, share: dataclasses.replace(kept, again={**kept.again, kind: share})
  for kind, in_window in ((Again.KEPT_OF_KERNELS, True), (Again.KEPT_OF_PRODUCTS, False)):
    assert 0 < copies(quantities.own_loop(config), kind) == pytest.approx(of_tokens(kind))
    assert copies(window, kind) == pytest.approx(in_window * of_tokens(kind))


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


@pytest.mark.parametrize(
    "name, slices, share", [("v6e-32", 1, 0.0), ("v6e-32", 2, 1.0), ("v6e-16", 1, 1.0), ("v5p-128", 1, 1.0)]
)
def test_gradients_over_all_devices_are_sent_once_where_these_are_one_ring(name, slices, share):
  config = run_config.read_without_run(
      [
          *("model_name=llama3-8b", f"compile_topology={name}", f"compile_topology_num_slices={slices}"),
          *("ici_fsdp_parallelism=-1", f"dcn_fsdp_parallelism={slices}", "dataset_type=synthetic"),
          "compile_xla_flags=--xla_jf_spmd_threshold_for_windowed_einsum_mib=1000000",  # no collective matmul
      ]
  )
  parameters, mesh = abstract_model.explained(config)
  its_slice = topology.slice_of(name.partition("-")[0], mesh.size // slices)
  of_weights = weights.Weights(config, parameters, mesh)
  sizes = quantities.Quantities(config, quantities.own_loop(config), of_weights, its_slice).sizes
  assert sizes.in_steps == pytest.approx(share, abs=1e-3)
  # Of projections those that read activations of `embed`, along which they are sharded.
  first, last = 4096 + 2 * 1024 + 2 * 14336, 4096 + 14336
  assert sizes.rings_last == pytest.approx(first / (first + last), abs=1e-3)
  # Shards that do not fill tiles are sent twice all the same.
  assert sizes.all_reduced == pytest.approx(1.0, abs=1e-3) if share else sizes.all_reduced < 0.5


LAYERS = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096)  # weights of Llama 3 8B
ATTENTION = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 4096 * 8 + 2 * 4096)  # Mixtral 8x7B's without its experts


@pytest.mark.parametrize(
    "model, keys, copied",
    [
        ("llama3-8b", ["compile_topology=v6e-16"], LAYERS / 16),
        ("llama3-8b", ["compile_topology=v6e-16", "weight_dtype=bfloat16"], LAYERS / 16),
        ("llama3-8b", ["compile_topology=v6e-16", "ici_pipeline_parallelism=4", "num_pipeline_microbatches=4"], 0),
        ("mixtral-8x7b", ["compile_topology=v6e-16"], ATTENTION / 16),
    ],
    ids=["a layer", "narrow weights", "stages", "experts"],
)
def test_xla_copies_weights_but_those_of_experts_ahead_of_a_loop_over_layers(model, keys, copied):
  config = run_config.read_without_run(
      [f"model_name={model}", "ici_fsdp_parallelism=-1", "pipeline_impl=circular_bsw", "dataset_type=synthetic", *keys]
  )
  parameters, mesh = abstract_model.explained(config)
  of_weights = weights.Weights(config, parameters, mesh)
  found = quantities.Quantities(config, run_config.schedule_of(config), of_weights).sizes
  assert found.copies == pytest.approx(2 * copied, rel=5e-3)  # norms are not sharded


@pytest.mark.parametrize(
    "keys, within",
    [
        # (length along which a weight is gathered, elements of its other dimensions in a layer) -> weights of all layers
        (["compile_topology=v6e-16"], {(4096, 14336): 3, (4096, 4096): 2, (4096, 1024): 2}),
        (
            ["compile_topology=v6e-16", "compile_xla_flags=--xla_jf_spmd_threshold_for_windowed_einsum_mib=100"],
            {(4096, 14336): 3},
        ),
        (["compile_topology=v6e-16", "ici_data_parallelism=4", "ici_fsdp_parallelism=4"], {}),
        (["compile_topology=v6e-4"], {}),
        (["compile_topology=v6e-64"], {}),
        (["compile_topology=v6e-16", "compile_topology_num_slices=2", "dcn_data_parallelism=2"], {}),
        (["compile_topology=v6e-16", "pipeline_impl=circular_bsw"], {}),
        (
            ["compile_topology=v6e-16", "model_name=mixtral-8x7b", "sparse_matmul=False", "capacity_factor=1.25"],
            {(4096, 4096): 2, (4096, 1024): 2, (4096, 8): 1},
        ),
    ],
)
def test_collective_matmuls_are_those_of_matrices_that_all_devices_of_a_slice_share(monkeypatch, keys, within):
  monkeypatch.delenv("LIBTPU_INIT_ARGS", raising=False)
  given = ["per_device_batch_size=2", "max_target_length=2048", "dataset_type=synthetic"]
  config = run_config.read_without_run([*([] if "model_name" in str(keys) else ["model_name=llama3-8b"]), *given, *keys])
  parameters, mesh = abstract_model.explained(config)
  schedule = run_config.schedule_of(config) if "pipeline_impl" in str(keys) else quantities.own_loop(config)
  its_slice = topology.slice_of("v6e", mesh.size)
  of_weights = weights.Weights(config, parameters, mesh)
  of = quantities.Quantities(config, schedule, of_weights, its_slice).sizes.collective_matmuls
  found = collections.Counter()
  for each in of:
    found[each.along, each.others] += each.count / (each.along * each.others) / 32
  assert found == within
  assert all((each.devices, each.tokens, each.itemsize, each.hops) == (16, 4096.0, 2, 6) for each in of)


SMALL, LARGE = 2 * 151936 * 1536, 2 * 152064 * 5120  # weights of the logits: Qwen2.5 1.5B, whose table it is, and 14B
LOGITS = 2 * 8192 * 151936  # of 1.5B, four sequences of 2048
STAGES, SLICES = ["ici_pipeline_parallelism=2"], ["compile_topology_num_slices=2", "dcn_data_parallelism=2"]
REPLICAS = ["ici_data_parallelism=4", "ici_fsdp_parallelism=16"]
IN_PARTS = ["num_vocab_tiling=4", "vocab_tiling_ag_once=True"]


@pytest.mark.parametrize(
    "model, topology, keys, head, sent, beside",
    [
        # Gathered once; all-reduced, as 384 columns fill no tile; then among the stages, as those of a table are, too.
        ("1.5b", "v5e-8", STAGES, SMALL, 3 * 3 / 4 + 2 / 4, SMALL),
        ("1.5b", "v5p-16", STAGES, SMALL, 3 * 3 / 4 + 2 / 4, LOGITS),
        ("1.5b", "tpu7x-8", STAGES, SMALL, 3 * 3 / 4 + 2 / 4, LOGITS),
        ("1.5b", "v5e-8", [*STAGES, *SLICES], SMALL, 3 * 3 / 4 + 2 * 1.5 / 4, LOGITS),
        # A collective matmul scatters the gradient.
        ("1.5b", "v5e-8", [], SMALL, 2 * 7 / 8, LOGITS),
        # 320 rows fill tiles. The table's gradient is reduced among the stages only.
        ("14b", "v5e-64", ["ici_pipeline_parallelism=4"], LARGE, 2 * 15 / 16 + 2 * 1.5 / 16, LARGE),
        # All 64 devices shard it, through which no ring goes.
        ("14b", "v5e-64", [], LARGE, 3 * 63 / 64, LARGE),
        # Replicas add up what is sharded.
        ("14b", "v5e-64", REPLICAS, LARGE, 2 * 15 / 16 + 2 * 1.5 / 16, LARGE),
        # The table is an operand of a product, too, whose 320 columns fill no tile.
        ("14b", "v5e-64", [*REPLICAS, "use_iota_embed=True"], LARGE, 5 * 15 / 16 + 2 * 1.5 / 16, LARGE),
        # In parts it is all-reduced whole, over all devices, with four bytes.
        ("14b", "v5e-64", [*REPLICAS, *IN_PARTS], LARGE, 15 / 16 + 4 * 63 / 64 + 1.5 / 16, LARGE),
        # Logits that are smaller than their weight.
        ("14b", "v5p-128", IN_PARTS, LARGE, 63 / 64 + 4 * 63 / 64, LARGE),
    ],
)
def test_the_logits_weight_is_gathered_and_a_table_of_embeddings_is_not(model, topology, keys, head, sent, beside):
  sizes = ["per_device_batch_size=4", "max_target_length=2048", "attention=dot_product"]
  given = [f"model_name=qwen2.5-{model}", "ici_fsdp_parallelism=-1", "pipeline_impl=circular_bsw", *sizes]
  given += [f"compile_topology={topology}", "dataset_type=synthetic", "allow_split_physical_axes=True"]
  found, _ = sizes_of([*given, *keys], topology)
  assert found.head == head
  assert found.head_sent == pytest.approx(sent * head, rel=1e-3)  # the last norm is small
  assert found.beside_logits == beside


def test_tables_that_layers_look_up_are_not_gathered():
  """Gemma 4 E2B has one for each layer, of 2 · 262144 · 35 · 256 bytes."""
  given = ["model_name=gemma4-e2b", "compile_topology=v6e-64", "ici_fsdp_parallelism=-1", "scan_layers=False"]
  found, parameters = sizes_of([*given, "per_device_batch_size=1", "dataset_type=synthetic"], "v6e-64")
  assert [
      2 * row.layout.shape[0] * row.layout.shape[1] for row in parameters.rows if "tokens_per_layer" in row.layout.path
  ]
  assert found.head_sent < 4e9


def sizes_of(given, name):
  config = run_config.read_without_run(given)
  parameters, mesh = abstract_model.explained(config)
  its_slice = topology.slice_of(name.partition("-")[0], mesh.size // config.num_slices)
  of_weights = weights.Weights(config, parameters, mesh)
  ours = config.pipeline_impl != "host"
  schedule = run_config.schedule_of(config) if ours else quantities.own_loop(config)
  return quantities.Quantities(config, schedule, of_weights, its_slice).sizes, parameters

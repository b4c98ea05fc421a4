# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Where MaxText's models have their layers, read off the models; layouts of one model convert into each other."""

import pytest

from maxtext_pp_ext.checkpoint import moves
from maxtext_pp_ext.host.models import layouts, run_config
from tests.marks import slow_but

TINY = (
    *("base_emb_dim=16", "base_num_query_heads=2", "base_num_kv_heads=2", "head_dim=8", "base_mlp_dim=32"),
    *("vocab_size=32", "max_target_length=8", "override_model_config=True"),
)
MOE = ("num_experts=4", "num_experts_per_tok=2", "base_moe_mlp_dim=16")
DEEPSEEK = (
    *("model_name=deepseek3-tiny", "first_num_dense_layers=1", *MOE, "q_lora_rank=8", "kv_lora_rank=8"),
    *("qk_nope_head_dim=8", "qk_rope_head_dim=8", "v_head_dim=8"),
)
# name: (keys, layers, layers of a stage, whether single layers are another layout of the same model).
BLOCKS = {
    "llama": ((), 12, 1, True),
    "gemma 3": (("model_name=gemma3-4b",), 24, 6, True),
    "deepseek": (DEEPSEEK, 13, 1, True),
    "mixtral": (("decoder_block=mixtral", *MOE[:2], "base_moe_mlp_dim=32"), 12, 1, True),
    "qwen 3 next": (("model_name=qwen3-next-80b-a3b", *MOE), 16, 4, True),
}
# Its first layer is single in every layout. The others alternate, and are scanned over in pairs.
DEEPSEEK4 = (
    *("model_name=deepseek4-tiny", "override_model_config=True", "attention=dot_product", "base_num_decoder_layers=5"),
    *("first_num_hash_layers=1", "compress_ratios=[0,128,4,128,4]", *MOE[:2], "base_mlp_dim=32", "base_moe_mlp_dim=32"),
    *("base_num_kv_heads=1", "head_dim=16", "qk_rope_head_dim=16", "q_lora_rank=8", "o_lora_rank=8", "o_groups=2"),
    *("indexer_head_dim=16", "indexer_n_heads=2", "indexer_topk=4", "mhc_expansion_rate=2"),
)
# Without random state, which stages share.
PREFIX = ("params", "params")


def layout(*keys, **replaced):
  return layouts.of_config(layouts.config_of_layout([str(run_config.base_yml()), *TINY, *keys], **replaced))


def shapes(of):
  return {(*PREFIX, *leaf.path): leaf.shape for leaf in of.leaves if not leaf.is_random_state}


@pytest.mark.parametrize("keys, layers, per_stage, has_single", slow_but(["deepseek"], BLOCKS, spread=True))
def test_each_block_has_its_layers_in_every_layout(keys, layers, per_stage, has_single):
  keys = (*keys, f"base_num_decoder_layers={layers}")
  plain = layout(*keys)
  assert plain.number_of_layers == layers
  others = [layout(*keys, "scan_layers=False")] if has_single else []
  for per in (per_stage, 2 * per_stage):
    pipelined = {
        "ici_pipeline_parallelism": 2,
        "num_layers_per_pipeline_stage": per,
        "scan_layers_per_stage": per > per_stage,
    }
    others.append(layout(*keys, **pipelined))
  for other in others:
    there = moves.plan(shapes(plain), plain, other)
    assert {entry.path: entry.shape for entry in there.entries} == shapes(other)
    back = moves.plan(shapes(other), other, plain)
    assert {entry.path: entry.shape for entry in back.entries} == shapes(plain)
    assert not there.dropped and not back.dropped


def test_layers_of_deepseek_4_follow_those_that_choose_experts_by_the_hash_of_a_token():
  stacked, single = layout(*DEEPSEEK4), layout(*DEEPSEEK4, "scan_layers=False")
  assert stacked.description == "4 layers stacked along param_scan_axis=1, 1 not stacked, no pipeline"
  assert single.description == "5 layers not stacked, no pipeline"
  scale = ("post_self_attention_layer_norm", "scale")
  where = lambda *path: [layer for layer, _ in stacked.by_path["decoder", *path, *scale].layers()]
  assert where("layers_0") == [0]
  assert where("scanned_blocks", "layers_0") == [1, 3] and where("scanned_blocks", "layers_1") == [2, 4]
  argv = [str(run_config.base_yml()), *TINY, *DEEPSEEK4]
  for old, new in ((stacked, single), (single, stacked)):
    plan = moves.plan(shapes(old), old, new)
    assert {entry.path: entry.shape for entry in plan.entries} == shapes(new) and not plan.dropped
  found = layouts.of_checkpoint(argv, shapes(stacked), scan_layers=None, given={}, wanted=single)[1]
  assert found.leaves == stacked.leaves


@pytest.mark.parametrize("scan_axis", [0, 1])
def test_layers_of_a_stage_run_one_after_the_other(scan_axis):
  keys = ("base_num_decoder_layers=12", f"param_scan_axis={scan_axis}", "scan_layers_per_stage=True")
  of = layout(*keys, ici_pipeline_parallelism=3, num_layers_per_pipeline_stage=2)
  kernel = of.by_path["decoder", "pipeline_module", "layers", "scanned_layers", "mlp", "wo", "kernel"]
  assert [(axis.axis, axis.stride) for axis in kernel.axes] == [(0, 6), (1, 2), (2 + scan_axis, 1)]


def test_stages_over_slices_and_any_other_parallelism_are_of_no_account():
  keys = ("base_num_decoder_layers=12", "dcn_pipeline_parallelism=2", "ici_pipeline_parallelism=3")
  of = layout(*keys, "ici_fsdp_parallelism=16", "dcn_data_parallelism=-1", "num_layers_per_pipeline_stage=1")
  assert of.description == "pipeline of 6 stages × 2 repeats × 1 layer"


@pytest.mark.parametrize(
    "keys", slow_but(["another scan axis"], {"another scan axis": {"param_scan_axis": 0}, "the same": {}})
)
def test_a_checkpoints_layout_is_found_and_a_wrong_key_of_it_is_refused(keys):
  model = ("base_num_decoder_layers=12",)
  pipelined = {"ici_pipeline_parallelism": 3, "num_layers_per_pipeline_stage": 2, "scan_layers_per_stage": True}
  stored, wanted = layout(*model, **pipelined, **keys), layout(*model)
  argv = [str(run_config.base_yml()), *TINY, *model]
  find = lambda given: layouts.of_checkpoint(argv, shapes(stored), scan_layers=True, given=given, wanted=wanted)[1]
  assert find(keys).leaves == find({}).leaves == stored.leaves
  with pytest.raises(ValueError, match="not of this model in any layout"):
    find({"param_scan_axis": 2})


def test_another_model_is_refused_with_what_differs():
  argv = [str(run_config.base_yml()), *TINY, "base_num_decoder_layers=12"]
  stored = shapes(layout("base_num_decoder_layers=12", "base_mlp_dim=48"))
  with pytest.raises(
      ValueError, match=r"has the shape \[16, 12, 48\] in the checkpoint, but \[16, 12, 32\] in the model"
  ):
    layouts.of_checkpoint(argv, stored, scan_layers=True, given={}, wanted=layout("base_num_decoder_layers=12"))


def test_a_run_without_a_pipeline_has_no_schedule():
  argv = [str(run_config.base_yml()), *TINY, "base_num_decoder_layers=12"]
  with pytest.raises(ValueError, match="no pipeline"):
    layouts.schedule_of_run(argv)
  more = ("ici_pipeline_parallelism=3", "pipeline_delay_activation_forwarding=True", "num_layers_per_pipeline_stage=2")
  schedule = layouts.schedule_of_run([*argv, *more])
  assert (schedule.stages, schedule.microbatches, schedule.repeats, schedule.delay) == (3, 6, 2, 2)


@pytest.mark.parametrize("impl", ["host", "circular_bsw"])
@pytest.mark.parametrize(
    "wrong", ["per_device_batch_size=-3", "ici_fsdp_parallelism=0", "ici_pipeline_parallelism=-1", "vocab_size=inf"]
)
def test_a_schedule_is_of_a_run_whose_numbers_have_a_meaning_though_few_of_them_matter(impl, wrong):
  argv = [str(run_config.base_yml()), *TINY, "ici_pipeline_parallelism=2", f"pipeline_impl={impl}", wrong]
  with pytest.raises(ValueError, match=f"{wrong}:? "):
    layouts.schedule_of_run(argv)


def test_a_window_without_a_pipeline_has_one_stage_whose_repeats_are_the_layers():
  argv = [str(run_config.base_yml()), *TINY, "base_num_decoder_layers=12", "pipeline_impl=circular_bsw"]
  schedule = layouts.schedule_of_run(argv)
  assert (schedule.stages, schedule.microbatches, schedule.repeats, schedule.delay) == (1, 1, 12, 1)
  assert layouts.schedule_of_run([*argv, "num_pipeline_microbatches=4"]).microbatches == 4


@pytest.mark.parametrize("key, over_slices", [("ici_pipeline_parallelism", False), ("dcn_pipeline_parallelism", True)])
def test_a_schedule_knows_whether_its_stages_are_on_slices(key, over_slices):
  argv = [str(run_config.base_yml()), *TINY, "base_num_decoder_layers=12", "pipeline_impl=circular_bsw", f"{key}=2"]
  assert layouts.schedule_of_run(argv).over_slices == over_slices

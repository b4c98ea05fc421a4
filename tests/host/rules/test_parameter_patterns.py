# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of patterns over parameter paths: the same layers with a pipeline and without, or a refusal that helps."""

import ast
import re

from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
import jax
from maxtext.optimizers import optimizers
import pytest

from maxtext_pp_ext.checkpoint.layout import LayerAxis, Layout, Leaf
from maxtext_pp_ext.config import PipelineConfigError
from maxtext_pp_ext.config.view import ConfigView
from maxtext_pp_ext.host.models import layouts
from maxtext_pp_ext.host.rules import parameter_patterns

# Twelve layers, of three stages.
DENSE = {"base_num_decoder_layers": 12, "ici_pipeline_parallelism": 3, "pipeline_impl": "circular_bsw", "rows": 12}
DEEPSEEK = DENSE | {
    "base_num_decoder_layers": 7,
    "decoder_block": "deepseek",
    "first_num_dense_layers": 1,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "shared_experts": 1,
    "base_moe_mlp_dim": 16,
    "attention_type": "mla",
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
UNSCANNED = DENSE | {"scan_layers": False}
PARTLY = DENSE | {"pipeline_parallel_layers": 6}


def masked(key, patterns, keys):
  return keys | {key: patterns}


@pytest.mark.parametrize(
    "keys, patterns, without, with_pipeline",
    [
        pytest.param(DEEPSEEK, ["moe_layers/"], 16, 0, marks=pytest.mark.slow),
        (DEEPSEEK, ["decoder/(dense_layers|moe_layers)/"], 28, 12),
        pytest.param(DENSE, [".*norm.*", "decoder/layers/mlp/.*"], 6, 3, marks=pytest.mark.slow),
        (DENSE, ["decoder/pipeline_module/layers/mlp/"], 0, 3),
        (PARTLY, ["decoder/layers/mlp/wo"], 1, 0),
    ],
)
def test_a_pattern_that_selects_other_layers_in_a_pipeline_is_refused_with_one_that_does_not(
    make_config, keys, patterns, without, with_pipeline
):
  with pytest.raises(PipelineConfigError) as refused:
    make_config(**masked("trainable_parameters_mask", patterns, keys))
  text = str(refused.value)
  counts = re.search(r": (\d+) arrays? .*without, (\d+) arrays? .*with a pipeline\.", text)
  assert [int(count) for count in counts.groups()] == [without, with_pipeline]
  proposed = ast.literal_eval(re.search(r"Set trainable_parameters_mask=(\[.*\]), which", text)[1])
  make_config(**masked("trainable_parameters_mask", proposed, keys))
  assert make_config(**masked("adamw_mask", proposed, keys)).adamw_mask == proposed


@pytest.mark.parametrize(
    "keys, pattern, together",
    [
        (UNSCANNED, "layers_0/", "0, 1, 2, 3"),
        (UNSCANNED | {"num_layers_per_pipeline_stage": 2}, "layers_0/", "0, 2, 4, 6"),
        (PARTLY, "layers_outside_pipeline", "0, 1, 2, 3"),
    ],
)
def test_a_pattern_for_some_of_the_layers_in_an_array_is_refused_with_all_of_these(make_config, keys, pattern, together):
  with pytest.raises(PipelineConfigError, match=f"9 arrays .*No pattern.*one array of layers {together}"):
    make_config(**masked("trainable_parameters_mask", [pattern], keys))


@pytest.mark.parametrize(
    "keys, patterns",
    [
        (DENSE, ["norm", "bias"]),
        (DEEPSEEK, ["^decoder/moe_layers/", "^decoder/pipeline_module/layers/"]),  # together the same, each alone not
        (UNSCANNED, ["layers(_[0-9]+)?/mlp/wo"]),
        (PARTLY, ["^decoder/"]),
    ],
)
def test_patterns_that_select_the_same_layers_are_accepted(make_config, keys, patterns):
  assert make_config(**masked("adamw_mask", patterns, keys)).adamw_mask == patterns


def test_patterns_that_no_optimizer_reads_are_not_judged(make_config):
  make_config(**masked("adamw_mask", ["decoder/layers/"], DENSE), opt_type="sgd")


def test_what_is_no_regular_expression_is_refused_as_such(make_config):
  with pytest.raises(
      PipelineConfigError, match=r"adamw_mask has '\(pipe', which is not a regular expression: missing \)"
  ):
    make_config(**masked("adamw_mask", ["(pipe"], DENSE))


def test_what_counts_as_selected_is_what_maxtext_masks(make_config):
  """Checks the model with a pipeline and the one without."""
  pattern = "pre_self_attention|decoder/layers"
  config = make_config(**DENSE)
  for each in (config, ConfigView(config, (("using_pipeline_parallelism", False),))):
    params = nnx.state(layouts.abstract_model_of(each), nnx.Param)
    mask = optimizers._get_path_mask_fn([pattern])(nnx.as_pure(params))
    leaves = jax.tree_util.tree_leaves_with_path(mask)
    masked_by_maxtext = {tuple(str(key.key) for key in path) for path, is_masked in leaves if is_masked}
    selected = parameter_patterns._selected([pattern], layouts.of_config(each, nnx.Param))
    assert {leaf.path for leaf in selected} == masked_by_maxtext


def layout(*leaves):
  return Layout(leaves=leaves, description="")


def stacked(path, *, layers, first=0):
  axes = (LayerAxis(axis=0, stride=1),)
  return Leaf(path=tuple(path.split("/")), shape=(layers, 4), name=("w",), first=first, axes=axes)


def test_arrays_of_the_same_name_that_hold_other_layers_are_not_the_same():
  """Both patterns select one array, but these hold different layers."""
  without = layout(stacked("early/w", layers=2), stacked("late/w", layers=4, first=2))
  with_pipeline = layout(stacked("early/w", layers=4), stacked("late/w", layers=2, first=4))
  [text] = parameter_patterns.differences("adamw_mask", ["late"], with_pipeline, without)
  assert "1 array (only there: late/w) without, 1 array with a pipeline. No pattern" in text
  assert not list(parameter_patterns.differences("adamw_mask", ["w"], with_pipeline, without))


NAMES = st.sampled_from(["a", "a.b", "ab", "layers_0", "layers_1", "layers_10", "w"])
PATHS = st.sets(st.lists(NAMES, min_size=1, max_size=3).map(tuple), min_size=1)


@given(paths=PATHS, data=st.data())
def test_patterns_for_paths_select_these_and_no_others(paths, data):
  # No array is at the beginning of another's path.
  paths = {p for p in paths if not any(q != p and q[: len(p)] == p for q in paths)}
  chosen = {path for path in paths if data.draw(st.booleans())}
  patterns = parameter_patterns.patterns_of(chosen, paths)
  assert {p for p in paths if any(re.search(pattern, "/".join(p)) for pattern in patterns)} == chosen

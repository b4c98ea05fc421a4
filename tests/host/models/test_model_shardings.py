# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Our shardings against MaxText's, for every variable of every model config that MaxText ships."""

import os
import re

from flax import nnx
from flax.core.spmd import logical_axis_rules
import jax
import pytest

from maxtext_pp_ext.host.models import abstract_model, axes, run_config
from maxtext_pp_ext.host.models import layouts as of_models
from maxtext_pp_ext.sharding import divisible_spec, Kind, layouts
from tests.host.conftest import installed  # noqa: F401  pylint: disable=unused-import
from tests.host.models.test_layouts import MOE, TINY
from tests.sharding.common import mesh_of

QUICK = ("deepseek2-16b", "gemma3-4b", "qwen3.5-35b-a3b-fp8")
# Keys without which MaxText refuses the config.
KEYS = {
    r"deepseek3\.2|deepseek4|deepseek-custom": ("attention=dot_product",),
    # Its n-gram tables need a tokenizer from the network.
    r"deepseek-custom": ("override_model_config=True", "engram_layers=[]"),
    r"gemma4-e|qwen3-vl-[24]b|weaver": ("scan_layers=False",),
}
# 128 devices each: FSDP alone, with experts, with tensor parallelism, and an uneven bit of everything.
MESHES = {
    "fsdp": {"fsdp": 128},
    "expert": {"fsdp": 16, "expert": 8},
    "tensor": {"fsdp": 8, "tensor": 16},
    "mixed": {"stage": 2, "fsdp": 4, "fsdp_transpose": 2, "context": 2, "tensor": 2, "expert": 2},
}


def _models():
  folder = os.path.join(os.path.dirname(run_config.base_yml()), "models")
  # MaxText 0.2.5 has no model of that name, only the file.
  return sorted(file.removesuffix(".yml") for file in os.listdir(folder) if file != "llama3-405b.yml")


MODELS = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in _models()]


def _config(name):
  keys = [key for pattern, found in KEYS.items() if re.match(pattern, name) for key in found]
  return run_config.read_without_run([f"model_name={name}", "compile_topology=v5p-256", *keys])


def _state(config):
  return nnx.state(abstract_model.abstract_model(config, abstract_model.abstract_mesh(config)))


def _misplaced(state):
  """Paths of weights along whose wrong dimension MaxText 0.2.5 shards the stacked layers.

  Where a weight's own dimensions have no names, it puts the name of the stacked layers first, wherever they are.
  """
  found = set()
  for path, variable in jax.tree_util.tree_leaves_with_path(state, is_leaf=lambda x: isinstance(x, nnx.Variable)):
    metadata = variable.get_metadata()
    names, stacked = metadata.get("out_sharding"), metadata.get(nnx.PARTITION_NAME)
    axis = metadata.get("param_scan_axis")
    if names and axis is not None and stacked in names and names.index(stacked) != axis:
      assert names == (stacked,) and axis == 1 and variable.get_value().ndim > 1
      found.add(jax.tree_util.keystr(path, simple=True, separator="/"))
  return found


def _entries(spec):
  """The spec without replicated dimensions at the end, where MaxText has some and we have others."""
  entries = list(spec)
  while entries and entries[-1] is None:
    entries.pop()
  return entries


@pytest.mark.parametrize("name", MODELS)
def test_every_variable_is_sharded_as_maxtext_shards_it_or_as_it_has_to_be(installed, name):  # noqa: F811
  from maxtext.utils import sharding as host

  config = _config(name)
  state = _state(config)
  misplaced = _misplaced(state)
  assert not misplaced or re.match("qwen3.5|qwen3-next|gemma4", name)
  for mesh_name, sizes in MESHES.items():
    if not set(sizes) <= set(config.mesh_axes):
      continue
    mesh = mesh_of(**{axis: sizes.get(axis, 1) for axis in config.mesh_axes})
    with logical_axis_rules(config.logical_axis_rules):
      theirs = jax.tree.leaves(host.nnx_construct_named_sharding(state, mesh))
    ours = layouts(state, mesh, config.logical_axis_rules)
    assert ours and len(ours) == len(theirs)
    for layout, their in zip(ours, theirs, strict=True):
      spec, expected = _entries(layout.sharding.spec), _entries(their.spec)
      if layout.path in misplaced and mesh.shape.get("stage", 1) > 1:
        assert expected == ["stage"] and spec == _entries(divisible_spec([None, "stage"], layout.shape, mesh))
      elif spec != expected:
        # MaxText's cannot be: it names mesh axes that do not divide their dimension.
        assert not _divides(their, layout.shape), (mesh_name, layout.path, layout.shape, spec, expected)
        assert spec == _entries(divisible_spec(their.spec, layout.shape, mesh)), (mesh_name, layout)
      assert _divides(layout.sharding, layout.shape)


def _divides(sharding, shape):
  try:
    sharding.shard_shape(shape)
  except ValueError:
    return False
  return True


@pytest.mark.parametrize("name", MODELS)
def test_rules_that_ship_conflict_on_no_mesh_of_one_device_and_on_fsdp_where_both_dimensions_want_it(installed, name):  # noqa: F811
  config = _config(name)
  parameters = nnx.split_state(_state(config), nnx.Param, ...)[0]
  rules = axes.rules_in_play(config.logical_axis_rules)

  def conflicts(fsdp):
    mesh = mesh_of(**{axis: fsdp if axis == "fsdp" else 1 for axis in config.mesh_axes})
    return [conflict for layout in layouts(parameters, mesh, rules) for conflict in layout.conflicts]

  assert conflicts(1) == []
  found = [conflict for conflict in conflicts(8) if conflict.kind is not Kind.INDIVISIBLE]
  assert {conflict.kind for conflict in found} == ({Kind.TAKEN} if name.startswith("deepseek4") else set())
  assert all("wq_a/kernel" in conflict.path and "'q_lora' has fsdp (8 devices)" in conflict.problem for conflict in found)


@pytest.mark.parametrize(
    "keys, at",
    [
        ({"num_layers_per_pipeline_stage": 4}, 1),
        ({"num_layers_per_pipeline_stage": 8, "scan_layers_per_stage": True}, 0),
    ],
    ids=["repeats", "stages of scanned blocks"],
)
def test_weights_whose_own_dimensions_have_no_names_are_sharded_over_stages_along_the_stages(installed, keys, at):  # noqa: F811
  argv = [*TINY, "model_name=qwen3-next-80b-a3b", *MOE, "base_num_decoder_layers=16", "pipeline_impl=circular_bsw"]
  config = of_models.config_of_layout(argv, ici_pipeline_parallelism=2, **keys)
  parameters = nnx.state(of_models.abstract_model_of(config), nnx.Param)
  mesh = mesh_of(**{axis: 2 if axis == "stage" else 1 for axis in config.mesh_axes})
  rules = axes.rules_in_play(config.logical_axis_rules)
  found = [layout for layout in layouts(parameters, mesh, rules) if "pipeline_module" in layout.path]
  unnamed = [layout for layout in found if layout.path.endswith("rms_norm/scale")]
  assert unnamed and not any(layout.conflicts for layout in found)
  for layout in (layout for layout in found if layout.resolution):
    assert [i for i, entry in enumerate(layout.sharding.spec) if entry == "stage"] == [at], layout.path


def test_a_rule_that_loses_its_axis_to_one_of_one_device_is_found(installed):  # noqa: F811
  """base.yml's rules cost these models their tensor parallelism: `embed_attn` takes `fsdp_transpose`, of one device."""
  config = _config("qwen3.5-35b-a3b")
  mesh = mesh_of(**{axis: {"fsdp": 8, "tensor": 2}.get(axis, 1) for axis in config.mesh_axes})
  found = [c for layout in layouts(_state(config), mesh, config.logical_axis_rules) for c in layout.conflicts]
  assert {conflict.kind for conflict in found} == {Kind.TAKEN}
  assert any(
      "in_proj_qkvz" in c.path and "fsdp_transpose (1 device)" in c.problem and "not sharded over 'tensor'" in c.problem
      for c in found
  )

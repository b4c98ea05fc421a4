# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""MaxText's models created and restored by `maxtext_pp_ext.sharding`, against MaxText's own creation."""

from flax import nnx
import jax
import numpy as np
import pytest

from maxtext_pp_ext.sharding import create_sharded, restore_sharded

KEYS = {"ici_fsdp_parallelism": 4, "ici_tensor_parallelism": 2}


def _data(x):
  return np.asarray(jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x)


@pytest.fixture(name="made", params=["auto", "explicit"])
def _made(make_config, request):
  """(config, function that makes its model, mesh, the model as MaxText makes it)."""
  from maxtext.utils import maxtext_utils, maxtext_utils_nnx, model_creation_utils

  config = make_config(**KEYS, shard_mode=request.param)
  mesh = maxtext_utils.get_mesh_from_config(config)
  create_model, abstract = model_creation_utils.create_nnx_abstract_model(config, mesh)
  return config, create_model, mesh, maxtext_utils_nnx.create_nnx_sharded_model(abstract, create_model, mesh)


def test_a_created_model_has_the_values_and_shardings_of_maxtexts(made):
  config, create_model, mesh, theirs = made
  ours = create_sharded(create_model, mesh, config.logical_axis_rules, on_conflict="error")
  pairs = list(zip(jax.tree.leaves(nnx.state(ours)), jax.tree.leaves(nnx.state(theirs)), strict=True))
  assert len(pairs) > 10
  for our, their in pairs:
    assert our.sharding.is_equivalent_to(their.sharding, our.ndim)
    # Two programs: XLA may compute a random number's last bit otherwise in one of them.
    np.testing.assert_allclose(_data(our), _data(their), rtol=0, atol=2.0**-22)


def test_weights_that_maxtext_saved_are_restored_onto_another_mesh(made, make_config, tmp_path):
  from maxtext.common import checkpointing
  from maxtext.utils import maxtext_utils, model_creation_utils

  config, _, _, theirs = made
  saved = nnx.state(theirs, nnx.Param)
  checkpointing.save_params_to_path(str(tmp_path / "saved"), {"params": nnx.to_pure_dict(saved)})
  other = make_config(
      ici_fsdp_parallelism=8, ici_tensor_parallelism=1, shard_mode=config.shard_mode.value, init_weights_seed=7
  )
  mesh = maxtext_utils.get_mesh_from_config(other)
  create_model = model_creation_utils.get_nnx_create_model_fn(other, mesh)
  restored = restore_sharded(
      tmp_path / "saved" / "items",
      create_model,
      mesh,
      other.logical_axis_rules,
      at="params/params",
      created=nnx.Not(nnx.Param),
  )
  kernel = restored.decoder.layers.mlp.wi_0.kernel.get_value()
  assert kernel.sharding.mesh == mesh and kernel.addressable_shards[0].data.shape == (16 // 8, 4, 32)
  for our, their in zip(jax.tree.leaves(nnx.state(restored, nnx.Param)), jax.tree.leaves(saved), strict=True):
    np.testing.assert_array_equal(_data(our), _data(their))

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Restores checkpoints into other shardings than they were written from."""

import pickle

from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
from orbax import checkpoint as ocp
import pytest

from maxtext_pp_ext.sharding import CheckpointMismatchError, create_sharded, restore_sharded, ShardingConflictError
from tests.sharding.test_create import mesh_of_devices, Mlp, mlp, mlp_and_optimizer, RULES


def other_values():
  """The same model and optimizer from another seed: restoring must replace all these values."""
  model = Mlp(nnx.Rngs(7, dropout=8))
  return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)


def save(path, tree):
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(path, tree)
  return path


def arrays(tree):
  data = lambda x: np.asarray(jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x)
  return [data(x) for x in jax.tree.leaves(nnx.state(tree))]


def assert_equal(one, other):
  for a, b in zip(arrays(one), arrays(other), strict=True):
    np.testing.assert_array_equal(a, b)


@pytest.fixture(scope="module")
def trained():
  """A model and optimizer on 4 × 2 devices whose state is not what init_fn makes."""
  model, optimizer = create_sharded(mlp_and_optimizer, mesh_of_devices(), RULES)
  optimizer.update(model, jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param)))
  return model, optimizer


@pytest.fixture(scope="module")
def checkpoint(trained, tmp_path_factory):
  return save(tmp_path_factory.mktemp("checkpoint") / "both", nnx.state(trained))


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_model_optimizer_and_random_state_come_back_on_another_mesh(checkpoint, trained, axis_type):
  mesh = mesh_of_devices(axis_type, fsdp=2, tensor=4)
  model, optimizer = restored = restore_sharded(checkpoint, other_values, mesh, RULES)
  assert_equal(restored, trained)
  for kernel in (model.up.kernel, optimizer.opt_state[0].mu.up.kernel):
    assert kernel.get_value().sharding.mesh == mesh and kernel.get_value().sharding.spec == P("fsdp", "tensor")
    assert kernel.get_value().addressable_shards[0].data.shape == (32, 24)
  assert jax.dtypes.issubdtype(model.dropout.rngs.key.get_value().dtype, jax.dtypes.prng_key)


def test_a_pure_dict_is_as_good_as_a_state_and_may_be_a_part_of_the_checkpoint(trained, tmp_path):
  model, _ = trained
  path = save(tmp_path / "nested", {"step": jnp.zeros(()), "params": {"params": nnx.to_pure_dict(nnx.state(model))}})
  restored = restore_sharded(
      path, lambda: other_values()[0], mesh_of_devices(fsdp=8, tensor=1), RULES, at="params/params"
  )
  assert_equal(restored, model)


def test_of_a_checkpoint_of_parameters_the_rest_is_made(trained, tmp_path):
  model, _ = trained
  path = save(tmp_path / "params", nnx.state(model, nnx.Param))
  fresh = lambda: other_values()[0]
  made = create_sharded(fresh, mesh_of_devices(), RULES)
  restored = restore_sharded(path, fresh, mesh_of_devices(fsdp=2, tensor=4), RULES, created=nnx.RngState)
  assert_equal(nnx.state(restored, nnx.Param), nnx.state(model, nnx.Param))
  assert_equal(nnx.state(restored, nnx.RngState), nnx.state(made, nnx.RngState))
  with pytest.raises(CheckpointMismatchError, match="dropout/rngs/key uint32.[24]. is not in the checkpoint"):
    restore_sharded(path, fresh, mesh_of_devices(), RULES)


def test_what_is_made_is_not_read_from_a_checkpoint_that_has_it(checkpoint, trained):
  restored = restore_sharded(checkpoint, other_values, mesh_of_devices(), RULES, created=nnx.RngState)
  assert_equal(nnx.state(restored, nnx.Param), nnx.state(trained, nnx.Param))
  made = create_sharded(other_values, mesh_of_devices(), RULES)
  assert_equal(nnx.state(restored, nnx.RngState), nnx.state(made, nnx.RngState))


def test_every_mismatch_is_named_with_both_sides(tmp_path):
  path = save(
      tmp_path / "wrong",
      {
          "up": {"kernel": jnp.zeros((64, 32)), "bias": jnp.zeros((96,), jnp.bfloat16)},
          "down": {"kernel": jnp.zeros((96, 64))},
          "more": jnp.zeros((3,)),
      },
  )
  with pytest.raises(CheckpointMismatchError) as raised:
    restore_sharded(path, mlp, mesh_of_devices(), RULES, created=nnx.RngState)
  assert set(raised.value.problems) == {
      "up/kernel is float32[64, 32] in the checkpoint, float32[64, 96] in the model: another shape",
      "up/bias is bfloat16[96] in the checkpoint, float32[96] in the model: another dtype",
      "down/bias float32[64] is not in the checkpoint",
      "more float32[3] is in the checkpoint only",
  }
  assert str(path) in str(raised.value) and str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)


def test_conflicts_are_an_error_before_anything_is_read(tmp_path):
  with pytest.raises(ShardingConflictError):
    restore_sharded(tmp_path / "nothing", mlp, mesh_of_devices(), [("embed", "nowhere")], on_conflict="error")


def test_a_folder_without_a_checkpoint_is_reported(tmp_path):
  (tmp_path / "empty").mkdir()
  for folder in ("nothing", "empty"):
    with pytest.raises(FileNotFoundError):
      restore_sharded(tmp_path / folder, mlp, mesh_of_devices(), RULES)

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Models and batches that are sharded from the start, on 8 devices."""

import functools
import re

from flax import nnx
import jax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

from maxtext_pp_ext.sharding import create_sharded, layouts, restore_sharded, shard_batch, ShardingConflictError
from maxtext_pp_ext.sharding.create import abstract_state, creation
from maxtext_pp_ext.sharding.variables import named_shardings, unwrap

RULES = [("batch", "fsdp"), ("embed", "fsdp"), ("mlp", "tensor")]


class Mlp(nnx.Module):
  """Two layers, and random state."""

  def __init__(self, rngs):
    up, down = {"out_sharding": ("embed", "mlp")}, {"out_sharding": ("mlp", "embed")}
    self.up = nnx.Linear(64, 96, rngs=rngs, kernel_metadata=up, bias_metadata={"out_sharding": ("mlp",)})
    self.down = nnx.Linear(96, 64, rngs=rngs, kernel_metadata=down)
    self.dropout = nnx.Dropout(0.5, rngs=rngs)


def mlp():
  return Mlp(nnx.Rngs(0, dropout=1))


def mlp_and_optimizer():
  model = mlp()
  return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)


def mesh_of_devices(axis_type=AxisType.Auto, fsdp=4, tensor=2):
  return jax.make_mesh((fsdp, tensor), ("fsdp", "tensor"), axis_types=(axis_type,) * 2)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_variables_and_optimizer_state_are_laid_out_by_the_rules_and_have_the_values_of_one_device(axis_type):
  mesh = mesh_of_devices(axis_type)
  model, optimizer = create_sharded(mlp_and_optimizer, mesh, RULES, on_conflict="error")
  for kernel in (model.up.kernel, optimizer.opt_state[0].mu.up.kernel, optimizer.opt_state[0].nu.up.kernel):
    assert kernel.get_value().sharding == NamedSharding(mesh, P("fsdp", "tensor"))
  assert model.up.bias.get_value().sharding.spec == P("tensor")
  assert model.down.kernel.get_value().addressable_shards[0].data.shape == (48, 16)
  state = nnx.state((model, optimizer))
  assert all(
      x.sharding == layout.sharding for x, layout in zip(jax.tree.leaves(state), layouts(state, mesh, RULES), strict=True)
  )
  alone = nnx.state(_on_one_device(mlp_and_optimizer))
  data = lambda x: np.asarray(jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x)
  for ours, theirs in zip(jax.tree.leaves(state), jax.tree.leaves(alone), strict=True):
    np.testing.assert_array_equal(data(ours), data(theirs))


def _on_one_device(init_fn):
  with nnx.use_eager_sharding(False):
    return nnx.jit(init_fn)()


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_no_device_ever_holds_a_whole_weight(axis_type):
  mesh = mesh_of_devices(axis_type)
  _, abstract = abstract_state(mlp)
  shardings = unwrap(named_shardings(abstract, mesh, RULES))
  with jax.set_mesh(mesh):
    program = creation(mlp, mesh, shardings).lower().compile().as_text()
  assert "f32[16,48]" in program  # its part of up
  assert not re.search(r"\[(64,96|96,64|6144|6,?144)\]", program)


def test_conflicts_are_an_error_before_anything_is_made():
  with pytest.raises(ShardingConflictError, match="'embed' has fsdp") as raised:
    create_sharded(mlp_and_optimizer, mesh_of_devices(), [("embed", "fsdp"), ("mlp", "fsdp")], on_conflict="error")
  # Each parameter once: its optimizer state follows it.
  assert [c.path for c in raised.value.conflicts] == ["0/down/kernel", "0/up/kernel"]


class Stack(nnx.Module):
  """Layers that nnx.vmap stacks: with names for the dimensions of one layer, and a name for theirs if it is given."""

  def __init__(self, rngs, **metadata):
    @nnx.split_rngs(splits=4)
    @functools.partial(nnx.vmap, **metadata)
    def make(rngs):
      return nnx.Linear(16, 16, use_bias=False, rngs=rngs, kernel_metadata={"out_sharding": ("embed", "mlp")})

    self.layers = make(rngs)


NAMED = {"transform_metadata": {nnx.PARTITION_NAME: "layers"}}


@pytest.mark.parametrize("metadata", [{}, NAMED], ids=["no name", "a name"])
def test_layers_that_are_stacked_without_a_name_are_an_error_before_anything_is_made(metadata, tmp_path):
  mesh, rules = mesh_of_devices(), [*RULES, ("layers", None)]
  init = lambda: Stack(nnx.Rngs(0), **metadata)
  restore = lambda *args, **options: restore_sharded(tmp_path, *args, **options)
  for make in (create_sharded, restore) if not metadata else ():
    with pytest.raises(ShardingConflictError, match="2 logical axes for 3 dimensions") as raised:
      make(init, mesh, rules, on_conflict="error")
    assert [c.array for c in raised.value.conflicts] == ["layers/kernel [4, 16, 16] (embed, mlp)"]
  if metadata:
    model = create_sharded(init, mesh, rules, on_conflict="error")
    assert model.layers.kernel.get_value().sharding.spec == P(None, "fsdp", "tensor")


def test_a_trained_step_is_that_of_one_device():
  x = np.random.default_rng(0).normal(size=(8, 64)).astype(np.float32)

  @nnx.jit
  def step(model, optimizer, x):
    def loss(model):
      return ((model.down(nnx.relu(model.up(x))) - x) ** 2).mean()

    value, grads = nnx.value_and_grad(loss)(model)
    optimizer.update(model, grads)
    return value

  mesh = mesh_of_devices()
  model, optimizer = create_sharded(mlp_and_optimizer, mesh, RULES)
  batch = shard_batch(x, mesh, ("batch",), RULES)
  with jax.default_matmul_precision("highest"):
    losses = [step(model, optimizer, batch) for _ in range(3)]
    alone = _on_one_device(mlp_and_optimizer)
    expected = [step(*alone, x) for _ in range(3)]
  # Sums of 64 to 96 terms in another order.
  np.testing.assert_allclose(losses, expected, rtol=100 * np.finfo(np.float32).eps)
  assert losses[2] < losses[0]
  assert model.up.kernel.get_value().sharding.spec == P("fsdp", "tensor")


def test_batches_are_sharded_by_the_rules_each_array_along_the_axes_it_has():
  mesh = mesh_of_devices()
  batch = {"tokens": np.arange(32).reshape(8, 4), "weights": np.ones((8,), np.float32), "step": np.int32(3)}
  placed = shard_batch(batch, mesh, ("batch", "length"), [*RULES, ("length", None)])
  assert {k: v.sharding.spec for k, v in placed.items()} == {
      "tokens": P("fsdp", None),
      "weights": P("fsdp"),
      "step": P(),
  }
  for key, value in batch.items():
    np.testing.assert_array_equal(placed[key], value)


def test_a_batch_that_cannot_be_sharded_is_an_error_unless_said_otherwise():
  mesh, batch = mesh_of_devices(), {"tokens": np.zeros((6, 4))}
  with pytest.raises(ShardingConflictError, match=r"size 6 is not a multiple of 4(.|\n)*batch/tokens \[6, 4\]"):
    shard_batch(batch, mesh, ("batch",), RULES)
  assert shard_batch(batch, mesh, ("batch",), RULES, on_conflict="fallback")["tokens"].sharding.spec == P(None)

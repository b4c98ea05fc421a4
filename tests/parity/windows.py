# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Whole models with MaxText's own loss, with an implementation of ours without a pipeline and with MaxText's scan."""

from __future__ import annotations

from collections.abc import Iterable
import dataclasses
from typing import Any

from flax import linen as nn
from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from maxtext.configs import pyconfig
from maxtext.trainers.pre_train import train
from maxtext.utils import maxtext_utils, model_creation_utils
import numpy as np
import pytest

from maxtext_pp_ext.pipelines import stages
from maxtext_pp_ext.testing import parity
from tests.parity.common import BASE_YML, TINY

PyTree = Any


def make_config(*, layers: int = 4, rows: int = 16, **keys: Any) -> Any:
  """A config without a pipeline: a batch of `rows` on all devices."""
  values = {
      **TINY,
      "base_num_decoder_layers": layers,
      "per_device_batch_size": rows / jax.device_count(),
      **keys,
  }
  return pyconfig.initialize(["", BASE_YML], **values)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
  """A model's structure, its state, and its mesh. `params` is what a training step differentiates."""

  config: Any
  mesh: Mesh
  graphdef: Any
  params: PyTree
  rest: PyTree


def build(config: Any, *, one_device: bool = False) -> Model:
  """A model with the initial values that MaxText gives it."""
  if one_device:
    mesh = Mesh(np.array(jax.devices()[:1]).reshape((1,) * len(config.mesh_axes)), config.mesh_axes)
  else:
    mesh = maxtext_utils.get_mesh_from_config(config)
  create, abstract = model_creation_utils.create_nnx_abstract_model(config, mesh)
  with jax.set_mesh(mesh), nn.logical_axis_rules(config.logical_axis_rules):
    shardings = jax.tree.map(lambda x: x.sharding, nnx.state(abstract))
    state = jax.jit(lambda: nnx.state(create()), out_shardings=shardings)()
  params, rest = nnx.split_state(state, stages.Differentiated, ...)
  return Model(config=config, mesh=mesh, graphdef=nnx.graphdef(abstract), params=params, rest=rest)


def batch(config: Any, seed: int = 0) -> dict[str, jax.Array]:
  """Random tokens, in sequences packed in two segments that differ by row; the last tokens are padding."""
  rows, length = config.global_batch_size_to_train_on, config.max_target_length
  keys = jax.random.split(jax.random.key(seed), 3)
  starts = jax.random.randint(keys[0], (rows, 1), 1, length - 1)
  at = jnp.arange(length, dtype=jnp.int32)[None]
  segments = jnp.where(at < starts, 1, 2).astype(jnp.int32).at[: rows // 2, -1].set(0)
  positions = jnp.where(at < starts, at, at - starts).astype(jnp.int32)
  found = {}
  for name, key in zip(("inputs", "targets"), keys[1:], strict=True):
    found[name] = jax.random.randint(key, (rows, length), 0, config.vocab_size, jnp.int32)
    found[f"{name}_segmentation"], found[f"{name}_position"] = segments, positions
  return found


def moved(params: PyTree, seed: int = 0) -> PyTree:
  """Parameters moved at random, so that no bias is zero and no two scales are equal."""
  numbers = np.random.default_rng(seed)
  move = lambda w: (w + 0.1 * numbers.standard_normal(w.shape, np.float32)).astype(w.dtype)
  return jax.tree.map(move, jax.device_get(params))


def with_own_keys(monkeypatch: pytest.MonkeyPatch) -> None:
  """Lets layers draw with their own keys, as in MaxText's scan; else each microbatch has keys derived from them."""
  monkeypatch.setattr(stages, "_keys_of_microbatch", lambda data, microbatch: jax.random.wrap_key_data(data))


def loss_and_gradients(model: Model, params: PyTree, data: dict[str, jax.Array], *, is_train: bool = True) -> tuple:
  """((loss, the other arrays that the loss function returns, by path), gradients of all parameters)."""
  place = lambda like, value: jax.device_put(np.asarray(value), like.sharding)
  # Leaf by leaf: a layer without annotations keeps the reference's mesh in its variables.
  leaves, structure = jax.tree.flatten(model.params)
  params = jax.tree.unflatten(structure, map(place, leaves, jax.tree.leaves(params)))
  data = jax.device_put(data, NamedSharding(model.mesh, P()))
  with jax.set_mesh(model.mesh), nn.logical_axis_rules(model.config.logical_axis_rules):
    return jax.device_get(_step(model, data, is_train)(params))


def program(model: Model) -> str:
  """The text of the program of `loss_and_gradients`, as JAX traces it."""
  with jax.set_mesh(model.mesh), nn.logical_axis_rules(model.config.logical_axis_rules):
    return str(_step(model, batch(model.config), True).trace(model.params).jaxpr)


def _step(model: Model, data: dict[str, jax.Array], is_train: bool) -> Any:

  def loss(params):
    merged = nnx.merge(model.graphdef, params, model.rest, copy=True)
    value, aux = train.loss_fn(merged, model.config, dict(data), None, None, is_train=is_train)
    others = {name: x for name, x in aux.items() if name not in ("intermediate_outputs", "total_weights")}
    return value, {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(others)}

  return jax.jit(jax.value_and_grad(loss, has_aux=True))


def compare(
    implementations: Iterable[str],
    *,
    amplification: float = 1.0,
    bound: float | None = None,
    scan_on_the_mesh: bool = False,
    unused: Iterable[str] = (),
    **keys: Any,
) -> None:
  """Asserts that the loss, what belongs to it, and every gradient are those of MaxText's scan on one device.

  The initial parameters must be equal, and at the same paths. The loss must not be 0, and every parameter must have a
  gradient: otherwise nothing would be compared.

  Args:
    implementations: values of `pipeline_impl`.
    amplification: how much more the layers amplify rounding than `parity.tolerance` allows for.
    bound: the largest relative error instead of that.
    scan_on_the_mesh: whether MaxText's scan runs on the window's mesh instead of one device. Layers with MaxText's sparse
      experts need that: they have a load-balance loss for each part of the tokens.
    unused: parts of the names of parameters that have no gradient, for a reason that has nothing to do with windows.
    **keys: arguments of `make_config`.
  """
  config = make_config(**{**keys, "pipeline_impl": "host", **_OF_THE_REFERENCE})
  reference = build(config, one_device=not scan_on_the_mesh)
  params, data = moved(reference.params), batch(reference.config)
  bound = amplification * parity.tolerance(reference.config) if bound is None else bound
  (loss, others), gradients = loss_and_gradients(reference, params, data)
  assert loss and np.isfinite(loss)
  without = [path for path, g in _by_path(gradients).items() if not np.any(g)]
  assert not [path for path in without if not any(part in path for part in unused)], without
  for name in implementations:
    found = build(make_config(**keys, pipeline_impl=name))
    same_start(reference.params, found.params)
    (own_loss, own_others), own = loss_and_gradients(found, params, data)
    found_errors = {"loss": parity.relative_error(own_loss, loss)}
    assert own_others.keys() == others.keys()
    found_errors |= {key: parity.relative_error(own_others[key], value) for key, value in others.items()}
    found_errors |= errors(own, gradients)
    bad = {key: error for key, error in found_errors.items() if not error <= bound}
    assert not bad, (name, bound, bad)


# The reference is MaxText's own scan over the whole batch.
_OF_THE_REFERENCE = {
    "pipeline_remat_iterations": 0,
    "pipeline_remat_tensors": "",
    "num_pipeline_microbatches": -1,
    "shard_mode": "auto",
}


def same_start(expected: PyTree, found: PyTree) -> None:
  """Asserts that two models have equal parameters at equal paths."""
  expected, found = _by_path(expected), _by_path(found)
  assert expected.keys() == found.keys()
  for path, value in expected.items():
    np.testing.assert_allclose(np.asarray(found[path]), np.asarray(value), rtol=1e-6, atol=1e-6, err_msg=path)


def _by_path(tree: PyTree) -> dict[str, np.ndarray]:
  return {jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree_util.tree_leaves_with_path(tree)}


def errors(found: PyTree, expected: PyTree) -> dict[str, float]:
  """The relative error of each gradient, by path."""
  wanted, actual = _by_path(expected), _by_path(found)
  mean = np.sqrt(sum(np.sum(g**2) for g in wanted.values()) / sum(g.size for g in wanted.values()))
  least = {path: parity.LEAST_GRADIENT * mean * np.sqrt(g.size) for path, g in wanted.items()}
  return {path: parity.relative_error(actual[path], wanted[path], least[path]) for path in wanted}

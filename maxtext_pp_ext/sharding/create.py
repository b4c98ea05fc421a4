# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Models whose variables are born sharded, and batches that come sharded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from flax import nnx
import jax
from jax.sharding import Mesh, NamedSharding
import numpy as np

from maxtext_pp_ext.sharding.conflicts import OnConflict, conflicts, settle
from maxtext_pp_ext.sharding.explicit import run_automatic
from maxtext_pp_ext.sharding.resolve import read_rules, resolution
from maxtext_pp_ext.sharding.variables import PyTree, named_shardings, unwrap


def abstract_state(init_fn: Callable[[], Any]) -> tuple[Any, nnx.State]:
  """The graph definition of what `init_fn` makes, and its state with ShapeDtypeStructs for values."""
  # With logical names for annotations, only `named_shardings` knows how to shard a variable.
  with nnx.use_eager_sharding(False):
    return nnx.split(nnx.eval_shape(init_fn))


def create_sharded(
    init_fn: Callable[[], Any], mesh: Mesh, rules: Iterable | None = None, *, on_conflict: OnConflict = "fallback"
) -> Any:
  """Makes a model with each variable sharded from the start: no device ever holds more than its own part.

  Args:
    init_fn: makes the model, or a tuple of a model and its `nnx.Optimizer`, from nothing. It is traced, twice.
    mesh: the device mesh.
    rules: (logical name, mesh axes) pairs; None for those of the context.
    on_conflict: "fallback", "warn" or "error"; see `conflicts`.

  Returns:
    What `init_fn` returns, laid out as `named_shardings` says. Optimizer state is laid out as its parameters.

  Raises:
    ShardingConflictError: with on_conflict="error", before anything is compiled.
  """
  graphdef, abstract = abstract_state(init_fn)
  shardings = unwrap(named_shardings(abstract, mesh, rules, on_conflict=on_conflict))
  with jax.set_mesh(mesh):
    return nnx.merge(graphdef, creation(init_fn, mesh, shardings)())


def creation(
    init_fn: Callable[[], Any], mesh: Mesh, shardings: PyTree, which: Callable[[nnx.State], nnx.State] = lambda s: s
) -> Callable[[], nnx.State]:
  """The jitted function that makes the state of `create_sharded`, or `which` part of it; the mesh has to be set."""

  def make() -> nnx.State:
    with nnx.use_eager_sharding(False):
      return which(nnx.state(init_fn()))

  # With shardings in types, an initializer that names none would make the whole array on each device.
  make = run_automatic(make, mesh, jax.tree.map(lambda sharding: sharding.spec, shardings))
  return jax.jit(make, out_shardings=shardings)


def shard_batch(
    batch: PyTree,
    mesh: Mesh,
    axes: Sequence[str | None],
    rules: Iterable | None = None,
    *,
    on_conflict: OnConflict = "error",
) -> PyTree:
  """Puts a batch from this process's memory onto the devices.

  Args:
    batch: arrays [batch, …]. With several processes each gives its own rows.
    mesh: the device mesh.
    axes: logical names of the first dimensions, such as ("batch", "length"); an array takes as many as it has.
    rules: (logical name, mesh axes) pairs; None for those of the context.
    on_conflict: "error", "warn" or "fallback"; unlike a parameter, a batch that cannot be sharded is an error unless
      said otherwise.

  Returns:
    The batch as jax.Arrays over the mesh.

  Raises:
    ShardingConflictError: with on_conflict="error".
  """
  rules = read_rules(rules)
  alone = jax.process_count() == 1  # otherwise the shape of the whole is not known here

  def resolutions(path: Any, x: Any) -> Any:
    how = resolution(tuple(axes)[: np.ndim(x)], mesh, rules, np.shape(x) if alone else None)
    return jax.tree_util.keystr(path, simple=True, separator="/"), how, x

  found = jax.tree_util.tree_map_with_path(resolutions, batch)
  is_leaf = lambda x: isinstance(x, tuple) and len(x) == 3 and hasattr(x[1], "spec")
  leaves = jax.tree.leaves(found, is_leaf=is_leaf)
  settle((c for path, how, _ in leaves for c in conflicts(how, f"batch/{path}" if path else "batch")), on_conflict)
  place = lambda how, x: jax.make_array_from_process_local_data(NamedSharding(mesh, how.spec), np.asarray(x))
  return jax.tree.unflatten(jax.tree.structure(batch), [place(how, x) for _, how, x in leaves])

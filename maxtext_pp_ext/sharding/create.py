# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Creates models with sharded variables, and places batches sharded on devices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
import functools
import itertools
import operator
from typing import Any

from flax import nnx
import jax
from jax.sharding import Mesh, NamedSharding
import numpy as np

from maxtext_pp_ext.sharding.conflicts import conflicts, Kind, OnConflict, settle
from maxtext_pp_ext.sharding.constrain import run_automatic
from maxtext_pp_ext.sharding.resolve import mesh_axes, read_rules, resolution
from maxtext_pp_ext.sharding.variables import named_shardings, path_text, PyTree, unwrap


def abstract_state(init_fn: Callable[[], Any]) -> tuple[Any, nnx.State]:
  """The graph definition of the result of `init_fn`, and its state with ShapeDtypeStructs for values."""
  # With logical names for annotations, only `named_shardings` knows how to shard a variable.
  with nnx.use_eager_sharding(False):
    return nnx.split(nnx.eval_shape(init_fn))


def create_sharded(
    init_fn: Callable[[], Any], mesh: Mesh, rules: Iterable | None = None, *, on_conflict: OnConflict = "fallback"
) -> Any:
  """Makes a model with each variable sharded from the start: no device ever holds more than its own part.

  Args:
    init_fn: makes the model, or a tuple of a model and its `nnx.Optimizer`, without arguments. It is traced twice.
    mesh, rules, on_conflict: as for `named_shardings`.

  Returns:
    The result of `init_fn`, laid out by `named_shardings`. Optimizer state is laid out like its parameters.

  Raises:
    ShardingConflictError: with on_conflict="error", before anything is compiled.
  """
  graphdef, abstract = abstract_state(init_fn)
  shardings = unwrap(named_shardings(abstract, mesh, rules, on_conflict=on_conflict))
  with jax.set_mesh(mesh):
    return nnx.merge(graphdef, creation(init_fn, mesh, shardings)())


def creation(init_fn: Callable[[], Any], mesh: Mesh, shardings: PyTree, which: Any = ...) -> Callable[[], nnx.State]:
  """The jitted function that makes the state of `create_sharded`, or what the filter `which` selects; sets no mesh."""

  def make() -> nnx.State:
    with nnx.use_eager_sharding(False):
      return nnx.state(init_fn(), which)

  # With explicit mesh axes, an initializer that names no sharding would make the whole array on each device.
  make = run_automatic(make, mesh, jax.tree.map(operator.attrgetter("spec"), shardings))
  return jax.jit(make, out_shardings=shardings)


@functools.lru_cache(maxsize=64)
def _parts(mesh: Mesh, axes: tuple[str, ...]) -> int:
  """The number of equal parts into which processes divide a dimension that is sharded over these axes."""
  process_of = np.vectorize(operator.attrgetter("process_index"), otypes=[int])(mesh.devices)
  if jax.process_index() not in process_of:
    raise ValueError(
        f"Process {jax.process_index()} has no device of the mesh {dict(mesh.shape)}, and no part of its batch."
    )
  others = tuple(dim for dim, axis in enumerate(mesh.axis_names) if axis not in axes)
  blocks_of = {int(i): (process_of == i).any(axis=others).ravel() for i in np.unique(process_of)}
  parts = np.unique(list(blocks_of.values()), axis=0).astype(int)
  if (parts.sum(axis=0) > 1).any() or len(set(parts.sum(axis=1))) > 1:
    held = ", ".join(f"process {i} {np.flatnonzero(blocks).tolist()}" for i, blocks in blocks_of.items())
    name = " and ".join(axes)
    raise ValueError(
        f"{name} cuts a batch into blocks. Two processes must hold either the same blocks or equally many different ones,"
        f" but they hold: {held}. The mesh is {dict(mesh.shape)}. Give {name} another size, or another place in"
        " mesh_axes."
    )
  return len(parts)


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
    batch: arrays [batch, …]. With several processes, each passes the part that its devices hold. Processes along a mesh
      axis that does not shard the batch must pass the same rows; this is not checked.
    mesh, rules: as for `named_shardings`.
    axes: logical names of the first dimensions, such as ("batch", "length"). An array with fewer dimensions uses the
      first names.
    on_conflict: as for `named_shardings`; with several processes it is always "error".

  Returns:
    The batch as jax.Arrays over the mesh.

  Raises:
    ShardingConflictError: with on_conflict="error", or several processes.
    ValueError: this process has none of the mesh's devices, or the batch's blocks overlap between processes.
  """
  rules = read_rules(rules)
  several = jax.process_count() > 1
  leaves, tree = jax.tree_util.tree_flatten_with_path(batch)
  resolved, found = [], []
  for keys, x in leaves:
    names, shape = tuple(axes)[: np.ndim(x)], np.shape(x)
    if several:  # this process has a part of the array
      spec = resolution(names, mesh, rules).spec
      shape = tuple(size * _parts(mesh, mesh_axes(entry)) for size, entry in itertools.zip_longest(shape, spec))
    resolved.append(resolution(names, mesh, rules, shape))
    found += conflicts(resolved[-1], "/".join(filter(None, ("batch", path_text(keys)))))
  # Several processes: JAX would assume that an array that is not sharded is the same in all of them.
  on_conflict = "error" if several else on_conflict
  # The names are those of the first dimensions by definition.
  settle((conflict for conflict in found if conflict.kind is not Kind.UNNAMED), on_conflict)
  placed = [
      jax.make_array_from_process_local_data(NamedSharding(mesh, how.spec), np.asarray(x))
      for (_, x), how in zip(leaves, resolved, strict=True)
  ]
  return jax.tree.unflatten(tree, placed)

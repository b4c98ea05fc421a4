# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Creates models with sharded variables or restores them from Orbax checkpoints, and places batches on devices."""

from collections.abc import Callable, Iterable, Iterator, Sequence
import dataclasses
import functools
import itertools
import operator
import os
from typing import Any

from flax import nnx
import jax
from jax.sharding import Mesh, NamedSharding
import numpy as np

from maxtext_pp_ext.sharding.conflicts import conflicts, Kind, OnConflict, settle
from maxtext_pp_ext.sharding.constrain import run_automatic
from maxtext_pp_ext.sharding.resolve import mesh_axes, read_rules, resolution
from maxtext_pp_ext.sharding.variables import is_variable, key_names, named_shardings, path_text, PyTree, unwrap, value_of
from maxtext_pp_ext.units import counted

Path = tuple[str, ...]


def abstract_state(init_fn: Callable[[], Any]) -> tuple[Any, nnx.State]:
  """The graph definition of the result of `init_fn`, and its state with ShapeDtypeStructs for values."""
  # With logical names for annotations, only `named_shardings` knows how to shard a variable.
  with nnx.use_eager_sharding(False):
    return nnx.split(nnx.eval_shape(init_fn))


def create_sharded(
    init_fn: Callable[[], Any], mesh: Mesh, rules: Iterable | None = None, *, on_conflict: OnConflict = "fallback"
) -> Any:
  """Makes a model with each variable sharded from the start: no device ever holds more than its own part.

  `init_fn` makes the model, or a tuple of a model and its `nnx.Optimizer`, without arguments. It is traced twice. Other
  arguments are those of `named_shardings`, which lays the result out; optimizer state is laid out like its parameters.
  With on_conflict="error" raises ShardingConflictError before anything is compiled.
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

  Returns the batch as jax.Arrays over the mesh. Raises ShardingConflictError with on_conflict="error", or several
  processes; ValueError if this process has none of the mesh's devices, or the batch's blocks overlap between processes.
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


class CheckpointMismatchError(ValueError):
  """A checkpoint does not fit the model; the message lists every array that differs, `problems` has a line for each."""

  def __init__(self, path: str, problems: Sequence[str]):
    self.path, self.problems = path, tuple(problems)
    count = counted(len(self.problems), "array")
    super().__init__("\n".join([f"{count} of {path} and the model differ:", *(f"  - {text}" for text in self.problems)]))

  def __reduce__(self):
    return type(self), (self.path, self.problems)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Wanted:
  """An array of the model: its possible places in the checkpoint, its type and its sharding."""

  name: str
  places: tuple[Path, ...]
  value: jax.ShapeDtypeStruct
  sharding: NamedSharding

  @property
  def is_key(self) -> bool:
    return jax.dtypes.issubdtype(self.value.dtype, jax.dtypes.prng_key)

  @property
  def stored(self) -> jax.ShapeDtypeStruct:
    """The type of the array in the checkpoint, which stores random keys as their data."""
    value = jax.eval_shape(jax.random.key_data, self.value) if self.is_key else self.value
    return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=self.sharding)

  def restored(self, array: jax.Array) -> jax.Array:
    if not self.is_key or jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
      return array
    impl = jax.random.key_impl(self.value)  # type: ignore[arg-type]  # which reads the dtype only
    return jax.random.wrap_key_data(array, impl=impl)


def restore_sharded(
    path: str | os.PathLike,
    init_fn: Callable[[], Any],
    mesh: Mesh,
    rules: Iterable | None = None,
    *,
    at: str = "",
    created: Any = (),
    on_conflict: OnConflict = "fallback",
) -> Any:
  """Restores a model from an Orbax checkpoint. Each device reads its own part.

  The checkpoint may have been written from another mesh, with other rules. Only the variables that `created` selects are
  initialised.

  Args:
    path: the checkpoint's folder. It holds the `nnx.state`, or its `nnx.to_pure_dict`, of the result of `init_fn`.
    init_fn, mesh, rules, on_conflict: as for `create_sharded`.
    at: path of the state within the checkpoint, such as "model" or "params/params"; by default the whole checkpoint.
    created: an NNX filter for variables that `init_fn` makes instead: `nnx.RngState` for a checkpoint of parameters only.
      Their values in the checkpoint are not read.

  Returns the result of `init_fn`, with the checkpoint's values. Raises CheckpointMismatchError if an array is missing in
  the checkpoint or in the model, or has another shape or dtype; FileNotFoundError if there is no checkpoint.
  """
  from orbax import checkpoint as ocp  # pylint: disable=import-outside-toplevel

  path = str(path) if "://" in str(path) else os.path.abspath(path)
  graphdef, abstract = abstract_state(init_fn)
  shardings = named_shardings(abstract, mesh, rules, on_conflict=on_conflict)
  made, abstract = nnx.split_state(abstract, created, ...)
  made_shardings, shardings = nnx.split_state(shardings, created, ...)
  wanted = list(_wanted(abstract, unwrap(shardings)))
  not_read = {place for want in _wanted(made, unwrap(made_shardings)) for place in want.places}

  checkpointer = ocp.PyTreeCheckpointer()
  whole = checkpointer.metadata(path)
  whole = getattr(whole.item_metadata, "tree", whole.item_metadata)
  if whole is None:
    raise FileNotFoundError(f"{path} is no Orbax checkpoint. With ocp.CheckpointManager the folder is STEP/default.")
  root = tuple(part for part in at.split("/") if part)
  stored = {keys[len(root) :]: leaf for keys, leaf in _leaves(whole) if keys[: len(root)] == root}
  places = {(*root, *place): want for place, want in _match(path, wanted, stored, not_read).items()}
  target_of = lambda keys, _: want.stored if (want := places.get(key_names(keys))) else ocp.PLACEHOLDER
  target = jax.tree_util.tree_map_with_path(target_of, whole, is_leaf=_is_leaf)
  restore_args = ocp.checkpoint_utils.construct_restore_args(target)
  arrays = checkpointer.restore(path, args=ocp.args.PyTreeRestore(item=target, restore_args=restore_args))
  values = {places[at].name: places[at].restored(array) for at, array in _leaves(arrays) if at in places}
  state = jax.tree.unflatten(jax.tree.structure(abstract), [values[want.name] for want in wanted])
  if jax.tree.leaves(made):
    with jax.set_mesh(mesh):
      state = nnx.merge_state(creation(init_fn, mesh, unwrap(made_shardings), created)(), state)
  return nnx.merge(graphdef, state)


def _wanted(state: nnx.State, shardings: Any) -> Iterator[_Wanted]:
  """The arrays of a state, in the order of its leaves."""
  of = iter(jax.tree.leaves(shardings))
  for path, variable in jax.tree_util.tree_leaves_with_path(state, is_leaf=is_variable):
    for inner, array in jax.tree_util.tree_leaves_with_path(value_of(variable)):
      above, below = key_names(path), key_names(inner)
      # The first is that of an nnx.State, the second that of its pure dict.
      places = ((*above, "value", *below), (*above, *below))
      yield _Wanted(name="/".join(places[1]), places=places, value=array, sharding=next(of))


def _match(path: str, wanted: list[_Wanted], stored: dict[Path, Any], not_read: set[Path]) -> dict[Path, _Wanted]:
  """Finds each array in the checkpoint; raises CheckpointMismatchError with all arrays that differ."""
  problems, places = [], {}
  for want in wanted:
    if (place := next((place for place in want.places if place in stored), None)) is None:
      problems.append(f"{want.name} {_text(want.stored)} is not in the checkpoint")
      continue
    places[place] = want
    have = stored[place]
    another = "shape" if tuple(have.shape) != want.stored.shape else "dtype" if have.dtype != want.stored.dtype else None
    if another:
      texts = f"{_text(have)} in the checkpoint, {_text(want.stored)} in the model"
      problems.append(f"{want.name} is {texts}: another {another}")
  others = (place for place in stored if place not in places and place not in not_read)
  problems += [f"{'/'.join(place)} {_text(stored[place])} is in the checkpoint only" for place in others]
  if problems:
    raise CheckpointMismatchError(path, problems)
  return places


def _text(array: Any) -> str:
  return f"{array.dtype}{list(array.shape)}"


def _is_leaf(x: Any) -> bool:
  return hasattr(x, "shape") and hasattr(x, "dtype")


def _leaves(tree: Any) -> list[tuple[Path, Any]]:
  return [(key_names(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_leaf)]

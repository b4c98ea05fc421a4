# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Restores an Orbax checkpoint directly into shardings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
import dataclasses
import os
from typing import Any

from flax import nnx
import jax
from jax.sharding import Mesh, NamedSharding

from maxtext_pp_ext.sharding.conflicts import OnConflict
from maxtext_pp_ext.sharding.create import abstract_state, creation
from maxtext_pp_ext.sharding.variables import is_variable, named_shardings, unwrap, value_of
from maxtext_pp_ext.units import counted

Path = tuple[str, ...]


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

  Returns:
    The result of `init_fn`, with the checkpoint's values.

  Raises:
    CheckpointMismatchError: an array is missing in the checkpoint or in the model, or has another shape or dtype.
    ShardingConflictError: with on_conflict="error".
    FileNotFoundError: there is no checkpoint.
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

  def target_of(keys: Any, _: Any) -> Any:
    want = places.get(_keys(keys))
    return want.stored if want else ocp.PLACEHOLDER

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
      above, below = _keys(path), _keys(inner)
      # The first is that of an nnx.State, the second that of its pure dict.
      places = ((*above, "value", *below), (*above, *below))
      yield _Wanted(name="/".join(places[1]), places=places, value=array, sharding=next(of))


def _match(path: str, wanted: list[_Wanted], stored: dict[Path, Any], not_read: set[Path]) -> dict[Path, _Wanted]:
  """Finds each array in the checkpoint; raises CheckpointMismatchError with all arrays that differ."""
  problems, places = [], {}
  for want in wanted:
    place = next((place for place in want.places if place in stored), None)
    if place is None:
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
  return [(_keys(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_leaf)]


def _keys(path: Any) -> Path:
  return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)

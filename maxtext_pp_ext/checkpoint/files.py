# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads and writes Orbax checkpoints array by array: arrays opened and created here hold no data.

Orbax hides its formats (OCDBT or files, Zarr 2 or 3), but the handler of a type of leaf sees how to open each array. So a
"leaf" here is an open array instead of its values; `convert` decides what is copied when.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import json
import pathlib
import shutil
from typing import Any

from etils import epath
import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import type_handlers
import tensorstore as ts

from maxtext_pp_ext.checkpoint.layout import LayoutError, Path, Shape
from maxtext_pp_ext.checkpoint.places import find_items, TREE

_ROOT = "_CHECKPOINT_METADATA"
_COMMITTED = "commit_success.txt"
# Kinds of leaves that hold numbers. Orbax also has strings; MaxText's train state has none.
_KINDS = ("jax.Array", "np.ndarray", "scalar")


class DamagedCheckpointError(ValueError):
  """Files of a checkpoint are missing, cut off, or not what they should be."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredArray:
  """An array on disk, opened.

  Attributes:
    store: the open array.
    kind: the type of the saved value, as Orbax noted it.
  """

  store: Any
  kind: str

  @property
  def shape(self) -> Shape:
    return tuple(self.store.shape)

  @property
  def dtype(self) -> np.dtype:
    return self.store.dtype.numpy_dtype

  @property
  def chunk(self) -> Shape:
    """Shape of the part that is read at a time."""
    return tuple(max(1, size) for size in self.store.chunk_layout.read_chunk.shape or self.shape)

  @property
  def nbytes(self) -> int:
    return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True, kw_only=True)
class NewArray:
  """An array to create, which is to be read by `chunk`."""

  shape: Shape
  dtype: np.dtype
  chunk: Shape
  kind: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
  """An opened checkpoint.

  Attributes:
    root: its folder.
    items: the folder of its train state.
    arrays: its arrays.
    lists: nodes of its tree that are lists, with their lengths; all others are dicts.
    empty: leaves that are None.
    options: how Orbax stored it.
  """

  root: pathlib.Path
  items: pathlib.Path
  arrays: Mapping[Path, StoredArray]
  lists: Mapping[Path, int]
  empty: tuple[Path, ...]
  options: Mapping[str, bool]

  @property
  def shapes(self) -> dict[Path, Shape]:
    return {path: array.shape for path, array in self.arrays.items()}

  @property
  def scan_layers(self) -> bool | None:
    """The value of scan_layers that MaxText noted in the checkpoint; None if it noted none."""
    with reading(self.root):
      noted = _read_json(self.root / _ROOT).get("custom_metadata") or {}
      return noted.get("scan_layers")


def open_checkpoint(root: pathlib.Path) -> Checkpoint:
  """Opens all arrays of a checkpoint.

  Raises:
    FileNotFoundError: there is no checkpoint.
    LayoutError: it has leaves other than arrays and numbers.
    DamagedCheckpointError: Orbax cannot open it.
  """
  root = root.absolute()
  items = find_items(root)
  if items is None:
    raise FileNotFoundError(f"There is no Orbax checkpoint in {root}.")
  with reading(root):
    return _open(root, items)


@contextlib.contextmanager
def reading(root: pathlib.Path) -> Iterator[None]:
  """Turns the various errors of Orbax and TensorStore about damaged files into one error."""
  try:
    yield
  except (LayoutError, OSError):
    raise
  except Exception as error:
    raise DamagedCheckpointError(f"The checkpoint {root} cannot be read: {type(error).__name__}: {error}") from error


def _open(root: pathlib.Path, items: pathlib.Path) -> Checkpoint:
  folder = epath.Path(items)
  noted = _read_json(items / TREE)
  kinds = {
      tuple(str(k["key"]) for k in leaf["key_metadata"]): leaf["value_metadata"]["value_type"]
      for leaf in noted["tree_metadata"].values()
  }
  metadata = ocp.PyTreeCheckpointHandler().metadata(folder).tree
  classes = {kind: type(f"_Of{i}", (), {}) for i, kind in enumerate(_KINDS)}
  for path, _ in _leaves(metadata):
    if kinds.get(path) not in classes:
      raise LayoutError(f"{'/'.join(path)} of {root} is not an array ({kinds.get(path, 'of unknown type')}).")
  restore = jax.tree_util.tree_map_with_path(
      lambda key, _: ocp.RestoreArgs(restore_type=classes[kinds[_path(key)]]), metadata
  )
  handlers = ((cls, _Handler(kind)) for kind, cls in classes.items())
  opened = ocp.PyTreeCheckpointHandler(
      type_handler_registry=type_handlers.create_type_handler_registry(*handlers)
  ).restore(folder, args=ocp.args.PyTreeRestore(restore_args=restore))
  return Checkpoint(
      root=root,
      items=items,
      arrays=dict(_leaves(opened)),
      lists=dict(_lists(opened)),
      empty=tuple(_path(key) for key, leaf in _with_paths(opened, lambda x: x is None) if leaf is None),
      options={key: bool(noted.get(key)) for key in ("use_ocdbt", "use_zarr3")},
  )


def create(
    root: pathlib.Path,
    like: Checkpoint,
    arrays: Mapping[Path, NewArray],
    *,
    scan_layers: bool,
    fill: Callable[[Mapping[Path, Any]], None],
) -> None:
  """Writes a checkpoint into a new folder.

  Args:
    root: the folder, which has no checkpoint in it.
    like: the checkpoint from which it takes the format, and everything beside the train state.
    arrays: what to create.
    scan_layers: MaxText's key, noted in the new checkpoint.
    fill: is given the open arrays, and writes into them.
  """
  items = root / like.items.relative_to(like.root)
  skipped = {like.items, like.root / TREE, like.root / _COMMITTED} | (
      set(like.root.iterdir()) - {like.root / _ROOT} if like.items == like.root else set()
  )
  for path in like.root.iterdir():
    if path not in skipped:
      (shutil.copytree if path.is_dir() else shutil.copy2)(path, root / path.name)
  if (noted := _read_json(root / _ROOT)).get("custom_metadata"):
    if "scan_layers" in noted["custom_metadata"]:
      noted["custom_metadata"]["scan_layers"] = scan_layers
      (root / _ROOT).write_text(json.dumps(noted), encoding="utf-8")
  items.mkdir(exist_ok=True)
  classes = {kind: type(f"_Of{i}", (_Placed,), {}) for i, kind in enumerate(_KINDS)}
  written = _Written(len(arrays), fill)
  handlers = ((cls, _Handler(kind, written)) for kind, cls in classes.items())
  handler = ocp.PyTreeCheckpointHandler(
      type_handler_registry=type_handlers.create_type_handler_registry(*handlers), **like.options
  )
  item = _nested({path: classes[new.kind](path, new) for path, new in arrays.items()}, like)
  handler.save(epath.Path(items), args=ocp.args.PyTreeSave(item=item))
  handler.finalize(epath.Path(items))
  for old, new in {like.root: root, like.items: items}.items():
    if (old / _COMMITTED).is_file():  # Orbax's mark of a complete checkpoint on storage without renaming
      (new / _COMMITTED).write_text("Checkpoint commit was successful", encoding="utf-8")


class _Placed:
  """A leaf of the tree that is saved: its path, and the array to create there."""

  def __init__(self, path: Path, new: NewArray):
    self.path, self.new = path, new
    # Orbax reads these to count what it writes.
    self.shape, self.dtype, self.size = new.shape, new.dtype, int(np.prod(new.shape, dtype=np.int64))
    self.nbytes = self.size * new.dtype.itemsize


class _Written:
  """Collects the created arrays to fill them together: Orbax hands each kind of leaf to its own handler."""

  def __init__(self, count: int, fill: Callable[[Mapping[Path, Any]], None]):
    self._count, self._fill = count, fill
    self._stores: dict[Path, Any] = {}

  async def add(self, stores: Mapping[Path, Any]) -> None:
    self._stores |= stores
    if len(self._stores) == self._count:
      await asyncio.to_thread(self._fill, self._stores)


class _Handler(type_handlers.TypeHandler):
  """Opens arrays instead of reading them, and creates them instead of writing them."""

  def __init__(self, kind: str, written: _Written | None = None):
    self._kind, self._written = kind, written

  def typestr(self) -> str:
    return self._kind

  async def metadata(self, infos: Sequence[Any]) -> Sequence[Any]:
    raise NotImplementedError("Orbax's own handlers read metadata.")

  async def deserialize(self, infos: Sequence[Any], args: Sequence[Any] | None = None) -> Sequence[StoredArray]:
    specs = [type_handlers.get_json_tspec_read(info, use_ocdbt=info.is_ocdbt_checkpoint) for info in infos]
    opening = [
        ts.open(ts.Spec(spec), open=True, read=True, context=info.ts_context)
        for spec, info in zip(specs, infos, strict=True)
    ]
    return [StoredArray(store=await future, kind=self._kind) for future in opening]

  async def serialize(self, values: Sequence[_Placed], infos: Sequence[Any], args: Sequence[Any] | None = None) -> list:
    stores = {}
    for value, info in zip(values, infos, strict=True):
      await info.await_path_creation()
      spec = type_handlers.get_json_tspec_write(
          info,
          use_ocdbt=info.is_ocdbt_checkpoint,
          global_shape=value.new.shape,
          local_shape=value.new.chunk,
          dtype=value.new.dtype,
      )
      stores[value.path] = await ts.open(ts.Spec(spec), create=True, open=True, context=info.ts_context)
    await self._written.add(stores)  # type: ignore[union-attr]  # a handler that serializes has been given it
    return []


def _nested(leaves: Mapping[Path, Any], like: Checkpoint) -> Any:
  """Returns a tree of leaves, with lists where the old checkpoint has them."""
  tree: dict[str, Any] = {}
  for path, leaf in {**leaves, **dict.fromkeys(like.empty)}.items():
    node = tree
    for key in path[:-1]:
      node = node.setdefault(key, {})
    node[path[-1]] = leaf

  def with_lists(node: Any, path: Path) -> Any:
    if not isinstance(node, dict):
      return node
    below = {key: with_lists(child, (*path, key)) for key, child in node.items()}
    if path not in like.lists:
      return below
    return [below.get(str(i)) for i in range(like.lists[path])]

  return with_lists(tree, ())


def _lists(tree: Any, path: Path = ()) -> Iterator[tuple[Path, int]]:
  if isinstance(tree, (list, tuple)):
    yield path, len(tree)
    children = {str(i): child for i, child in enumerate(tree)}
  else:
    children = tree if isinstance(tree, dict) else {}
  for key, child in children.items():
    yield from _lists(child, (*path, str(key)))


def _leaves(tree: Any) -> Iterator[tuple[Path, Any]]:
  for key, leaf in _with_paths(tree, lambda x: isinstance(x, StoredArray)):
    yield _path(key), leaf


def _with_paths(tree: Any, is_leaf: Callable[[Any], bool]) -> list:
  return jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)


def _path(keys: Any) -> Path:
  return tuple(str(getattr(key, "key", getattr(key, "idx", None))) for key in keys)


def _read_json(path: pathlib.Path) -> dict[str, Any]:
  return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}

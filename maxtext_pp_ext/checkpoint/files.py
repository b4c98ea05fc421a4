# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads and writes Orbax checkpoints array by array; `convert` decides what is copied when.

Orbax hides its formats (OCDBT or files, Zarr 2 or 3), but the handler of a type of leaf sees how to open each array. So a
"leaf" here is an open array instead of its values.
"""

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import json
import math
import pathlib
import shutil
from typing import Any

from etils import epath
import jax
from jax.tree_util import DictKey, SequenceKey
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
  store: Any  # the open array
  kind: str  # the type of the saved value, as Orbax noted it

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class NewArray:
  path: Path
  shape: Shape
  dtype: np.dtype
  chunk: Shape  # shape of the part that is to be read at a time
  kind: str  # the type of the saved value

  # Orbax reads these to count what it writes.
  @property
  def size(self) -> int:
    return math.prod(self.shape)

  @property
  def nbytes(self) -> int:
    return self.size * self.dtype.itemsize


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
  root: pathlib.Path
  items: pathlib.Path  # the folder of its train state
  arrays: Mapping[Path, StoredArray]
  lists: frozenset[Path]  # nodes of its tree that are lists; all others are dicts
  empty: tuple[Path, ...]  # leaves that are None
  options: Mapping[str, bool]  # how Orbax stored it

  @property
  def shapes(self) -> dict[Path, Shape]:
    return {path: array.shape for path, array in self.arrays.items()}

  @property
  def scan_layers(self) -> bool | None:
    """The value of scan_layers that MaxText noted in the checkpoint; None if it noted none."""
    with reading(self.root):
      return (_read_json(self.root / _ROOT).get("custom_metadata") or {}).get("scan_layers")


def open_checkpoint(root: pathlib.Path) -> Checkpoint:
  """Opens all arrays of a checkpoint.

  Raises FileNotFoundError if there is no checkpoint, LayoutError if it has leaves other than arrays and numbers, and
  DamagedCheckpointError if Orbax cannot open it.
  """
  root = root.absolute()
  if (items := find_items(root)) is None:
    raise FileNotFoundError(f"There is no Orbax checkpoint in {root}.")
  with reading(root):
    folder = epath.Path(items)
    noted = _read_json(items / TREE)
    kinds = {
        tuple(str(k["key"]) for k in leaf["key_metadata"]): leaf["value_metadata"]["value_type"]
        for leaf in noted["tree_metadata"].values()
    }
    metadata = ocp.PyTreeCheckpointHandler().metadata(folder).tree
    for path in ocp.tree.to_flat_dict(metadata):
      if kinds.get(path) not in _KINDS:
        raise LayoutError(f"{'/'.join(path)} of {root} is not an array ({kinds.get(path, 'of unknown type')}).")
    classes = _classes(object)
    to_open = lambda keys, _: ocp.RestoreArgs(restore_type=classes[kinds[ocp.tree.str_keypath(keys)]])
    restore = jax.tree_util.tree_map_with_path(to_open, metadata)
    opened = _orbax(classes).restore(folder, args=ocp.args.PyTreeRestore(restore_args=restore))
    with_paths = jax.tree_util.tree_leaves_with_path
    leaves = {ocp.tree.str_keypath(keys): (keys, leaf) for keys, leaf in with_paths(opened, is_leaf=lambda x: x is None)}
    lists = (path[:i] for path, (keys, _) in leaves.items() for i, key in enumerate(keys) if isinstance(key, SequenceKey))
    return Checkpoint(
        root=root,
        items=items,
        arrays={path: leaf for path, (_, leaf) in leaves.items() if leaf is not None},
        lists=frozenset(lists),
        empty=tuple(path for path, (_, leaf) in leaves.items() if leaf is None),
        options={key: bool(noted.get(key)) for key in ("use_ocdbt", "use_zarr3")},
    )


@contextlib.contextmanager
def reading(root: pathlib.Path) -> Iterator[None]:
  """Turns the various errors of Orbax and TensorStore about damaged files into one error."""
  try:
    yield
  except (LayoutError, OSError):
    raise
  except Exception as error:
    raise DamagedCheckpointError(f"The checkpoint {root} cannot be read: {type(error).__name__}: {error}") from error


def create(
    root: pathlib.Path,
    like: Checkpoint,
    arrays: Sequence[NewArray],
    *,
    scan_layers: bool,
    fill: Callable[[Mapping[Path, Any]], None],
) -> None:
  """Writes a checkpoint into a folder that has none.

  `like` gives the format, and everything beside the train state. `scan_layers` is MaxText's key, noted in the new
  checkpoint. `fill` is given the open arrays, and writes into them.
  """
  items = root / like.items.relative_to(like.root)
  if like.items == like.root:
    beside = [path for path in like.root.iterdir() if path.name == _ROOT]
  else:
    beside = [path for path in like.root.iterdir() if path != like.items and path.name not in (TREE, _COMMITTED)]
  for path in beside:
    (shutil.copytree if path.is_dir() else shutil.copy2)(path, root / path.name)
  noted = _read_json(root / _ROOT)
  if "scan_layers" in (noted.get("custom_metadata") or ()):
    noted["custom_metadata"]["scan_layers"] = scan_layers
    (root / _ROOT).write_text(json.dumps(noted), encoding="utf-8")
  items.mkdir(exist_ok=True)
  classes = _classes(NewArray)
  handler = _orbax(classes, _Written(len(arrays), fill), **like.options)
  leaves = {new.path: classes[new.kind](**vars(new)) for new in arrays} | dict.fromkeys(like.empty)
  keyed = [(_keys(path, like.lists), leaf) for path, leaf in leaves.items()]
  # Orbax appends to lists in the order of leaves.
  keyed.sort(key=lambda pair: [key.idx if isinstance(key, SequenceKey) else key.key for key in pair[0]])
  handler.save(epath.Path(items), args=ocp.args.PyTreeSave(item=ocp.utils.from_flattened_with_keypath(keyed)))
  handler.finalize(epath.Path(items))
  for old, folder in {like.root: root, like.items: items}.items():
    if (old / _COMMITTED).is_file():  # Orbax's mark of a complete checkpoint on storage without renaming
      (folder / _COMMITTED).write_text("Checkpoint commit was successful", encoding="utf-8")


def _classes(base: type) -> dict[str, type]:
  """A class for each kind of leaves, since Orbax chooses a handler by the class of a leaf."""
  return {kind: type(f"_Of{i}", (base,), {}) for i, kind in enumerate(_KINDS)}


def _orbax(classes: Mapping[str, type], written: "_Written | None" = None, **options: bool) -> Any:
  handlers = ((cls, _Handler(kind, written)) for kind, cls in classes.items())
  registry = type_handlers.create_type_handler_registry(*handlers)
  return ocp.PyTreeCheckpointHandler(type_handler_registry=registry, **options)


def _keys(path: Path, lists: Collection[Path]) -> tuple[SequenceKey | DictKey, ...]:
  """A path with JAX's keys of lists and dicts."""
  return tuple(SequenceKey(int(name)) if path[:i] in lists else DictKey(name) for i, name in enumerate(path))


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
    opening = []
    for info in infos:
      spec = type_handlers.get_json_tspec_read(info, use_ocdbt=info.is_ocdbt_checkpoint)
      opening.append(ts.open(ts.Spec(spec), open=True, read=True, context=info.ts_context))
    return [StoredArray(store=await future, kind=self._kind) for future in opening]

  async def serialize(self, values: Sequence[NewArray], infos: Sequence[Any], args: Sequence[Any] | None = None) -> list:
    stores = {}
    for value, info in zip(values, infos, strict=True):
      await info.await_path_creation()
      spec = type_handlers.get_json_tspec_write(
          info, use_ocdbt=info.is_ocdbt_checkpoint, global_shape=value.shape, local_shape=value.chunk, dtype=value.dtype
      )
      stores[value.path] = await ts.open(ts.Spec(spec), create=True, open=True, context=info.ts_context)
    await self._written.add(stores)  # type: ignore[union-attr]  # a handler that serializes has been given it
    return []


def _read_json(path: pathlib.Path) -> dict[str, Any]:
  return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}

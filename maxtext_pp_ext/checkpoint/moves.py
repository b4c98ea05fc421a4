# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Plans which part of which array of a checkpoint goes where in a checkpoint of another layout.

A checkpoint has a model's arrays several times, below different prefixes: `params/params` has the parameters,
`nnx_aux/model` has biases of experts, scales of fp8 and random state, and `opt_state/0/mu/params` has a moment of each
parameter. Arrays are recognised by the end of their paths, so the kind of optimizer does not matter.
"""

from collections.abc import Mapping
import dataclasses

import numpy as np

from maxtext_pp_ext.checkpoint.layout import Index, Layout, LayoutError, Leaf, Path, Shape


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
  """An array of the new checkpoint."""

  path: Path
  shape: Shape
  like: Path  # an array of the old checkpoint of the same dtype
  leaf: Leaf | None  # the array of the model that it is, or belongs to; None if it belongs to no array of the model


@dataclasses.dataclass(frozen=True, kw_only=True)
class Move:
  """The move of one layer of an old array, or of the whole array."""

  name: str  # name of the array without its place in the layout, the same in both layouts
  path: Path  # path of the new array
  source: Index  # its place in the old array
  target: Index  # its place in the new one
  layer: int | None  # the layer's number; None for an array of no layer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
  entries: tuple[Entry, ...]  # arrays of the new checkpoint
  moves: Mapping[Path, tuple[Move, ...]]  # path in the old checkpoint -> the moves of its parts
  dropped: tuple[Path, ...]  # random state of layers that has no place in the new model


def plan(shapes: Mapping[Path, Shape], source: Layout, target: Layout) -> Plan:
  """Plans the conversion of a whole checkpoint, whose arrays have these shapes, from the layout `source` to `target`.

  Raises LayoutError if an array is not of the source's model, or the two are not layouts of one model.
  """
  of_prefix: dict[Path, dict[Path, Leaf]] = {}
  moves: dict[Path, tuple[Move, ...]] = {}
  entries: list[Entry] = []
  for path, shape in shapes.items():
    prefix, leaf = _recognise(path, shape, source)
    if leaf is None:
      entries.append(Entry(path=path, shape=shape, like=path, leaf=None))
      whole = _all(shape)
      moves[path] = (Move(name="/".join(path), path=path, source=whole, target=whole, layer=None),)
    else:
      of_prefix.setdefault(prefix, {})[leaf.path] = leaf
  if not of_prefix:
    raise LayoutError(f"The checkpoint has no array of this model ({source.description}).")
  dropped: list[Path] = []
  for prefix, leaves in of_prefix.items():
    added, moved, lost = _plan_of_prefix(prefix, leaves, shapes, source, target)
    entries += added
    moves |= moved
    dropped += lost
  return Plan(entries=tuple(entries), moves=moves, dropped=tuple(dropped))


def _all(shape: Shape) -> Index:
  return (slice(None),) * len(shape)


def _recognise(path: Path, shape: Shape, source: Layout) -> tuple[Path, Leaf | None]:
  """Splits a checkpoint's path into a prefix and a path in the model."""
  for start in range(len(path)):
    if (leaf := source.by_path.get(path[start:])) is not None:
      # Random keys are stored as words along one more axis.
      if shape != leaf.shape and not (leaf.is_random_state and shape[: len(leaf.shape)] == leaf.shape):
        raise LayoutError(
            f"{'/'.join(path)} has the shape {list(shape)} in the checkpoint, but {list(leaf.shape)} in the model "
            f"({source.description})."
        )
      return path[:start], leaf
  if not {leaf.path[0] for leaf in source.leaves}.isdisjoint(path):  # a part of the model
    raise LayoutError(f"{'/'.join(path)} is not in the model ({source.description}).")
  return path, None


def _plan_of_prefix(prefix: Path, leaves: Mapping[Path, Leaf], shapes: Mapping[Path, Shape], source, target):
  """Returns (entries, moves, dropped paths) of all arrays below one prefix."""
  places: dict[tuple, tuple[Leaf, Index]] = {}  # by (layer, name) or path
  for leaf in leaves.values():
    if leaf.name is None:
      places[leaf.path] = leaf, _all(leaf.shape)
    else:
      places |= {(layer, leaf.name): (leaf, index) for layer, index in leaf.layers()}
  entries = []
  moves: dict[Path, list[Move]] = {(*prefix, *path): [] for path in leaves}
  used = set()
  for leaf in target.leaves:
    path, name = (*prefix, *leaf.path), "/".join((*prefix, *(leaf.name or leaf.path)))
    wanted: list[tuple[int | None, tuple, Index]] = [(None, leaf.path, _all(leaf.shape))]
    if leaf.name is not None:
      wanted = [(layer, (layer, leaf.name), index) for layer, index in leaf.layers()]
    there = [key in places for _, key, _ in wanted]
    if not any(there):
      continue
    if not all(there):
      if leaf.is_random_state:
        continue
      missing = [str(layer) for (layer, _, _), has in zip(wanted, there, strict=True) if not has]
      raise LayoutError(
          f"{'/'.join(path)} is to hold the layers {', '.join(missing)}, which the checkpoint lacks "
          f"(checkpoint: {source.description}; wanted: {target.description})."
      )
    first = places[wanted[0][1]][0]
    like = (*prefix, *first.path)
    words = shapes[like][len(first.shape) :]  # of random keys
    for layer, key, index in wanted:
      from_leaf, from_index = places[key]
      if from_leaf.of_layer != leaf.of_layer:
        raise LayoutError(
            f"{'/'.join((*prefix, *from_leaf.path))} has {list(from_leaf.of_layer)} for each layer, but the model that "
            f"is to load it has {list(leaf.of_layer)} ({'/'.join(leaf.path)}): these are not two layouts of one model."
        )
      used.add(key)
      at, to = (*from_index, *_all(words)), (*index, *_all(words))
      moves[(*prefix, *from_leaf.path)].append(Move(name=name, path=path, source=at, target=to, layer=layer))
    entries.append(Entry(path=path, shape=(*leaf.shape, *words), like=like, leaf=leaf))
  unused = {(*prefix, *leaf.path): leaf for key, (leaf, _) in places.items() if key not in used}
  lost = [path for path, leaf in unused.items() if leaf.is_random_state]
  if kept := sorted("/".join(path) for path in unused if path not in lost):
    more = f" and {len(kept) - 3} more" if len(kept) > 3 else ""
    raise LayoutError(
        f"The model that is to load the checkpoint has no place for all of {', '.join(kept[:3])}{more} (checkpoint: "
        f"{source.description}; wanted: {target.description})."
    )
  return entries, {path: tuple(parts) for path, parts in moves.items()}, lost


def converted(arrays: Mapping[Path, np.ndarray], source: Layout, target: Layout) -> dict[Path, np.ndarray]:
  """Returns a model's arrays, path -> array, in another layout. Raises what `plan` raises."""
  found = plan({path: tuple(array.shape) for path, array in arrays.items()}, source, target)
  result = {entry.path: np.empty(entry.shape, arrays[entry.like].dtype) for entry in found.entries}
  for path, array in arrays.items():
    for move in found.moves[path]:
      result[move.path][move.target] = np.asarray(array)[move.source]
  return result

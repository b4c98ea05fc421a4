# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Writes a checkpoint anew in another layout, a piece at a time, and reads it back.

Each chunk of the old checkpoint is read once; its layers go where the new layout has them. The new chunks hold one layer
each, and of that as much as the old ones, so each is written once, whole. What is in memory is a few chunks: of a
parameter at most, and of one device's shard of it where that is what the run wrote.

Nothing looks like a checkpoint before it is one: it is written into a folder that Orbax takes for unfinished, compared
there with what was read, and renamed.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
import ctypes
import dataclasses
import hashlib
import itertools
import math
import pathlib
import shutil
from typing import Any

import jax.numpy as jnp
import numpy as np

from maxtext_pp_ext.checkpoint import files
from maxtext_pp_ext.checkpoint.layout import Index, Layout, LayoutError, Path
from maxtext_pp_ext.checkpoint.moves import Move, Plan, plan

UNFINISHED = ".orbax-checkpoint-tmp"  # Orbax neither loads nor counts a folder whose name ends so
# Small pieces are on their way together, up to so many bytes; a larger one is alone.
IN_FLIGHT = 32 * 2**20
_MODULUS = 2**128
_M_MMAP_THRESHOLD = -3  # in glibc's malloc.h

Checksums = dict[tuple[str, int | None], int]


def hold_no_freed_memory() -> None:
  """Has the C library give large blocks back when they are freed; it affects the whole process.

  Without it glibc, which learns from each block that was freed, soon serves all of them from heaps that do not shrink.
  """
  try:
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 2**16)
  except (AttributeError, OSError):
    pass  # another C library


class VerificationError(RuntimeError):
  """What was read back is not what was written; the new checkpoint has been removed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
  """What a conversion did.

  Attributes:
    arrays: number of arrays in the new checkpoint.
    nbytes: their size, uncompressed.
    layers: checksum of each layer, over all that the checkpoint has of it.
    rest: checksum of all else.
    dropped: random state of layers that the new model has nowhere, and draws anew.
  """

  arrays: int
  nbytes: int
  layers: tuple[str, ...]
  rest: str
  dropped: tuple[str, ...]


def convert(
    source: files.Checkpoint,
    destination: pathlib.Path,
    old: Layout,
    new: Layout,
    *,
    scan_layers: bool,
    on_bytes: Callable[[str, int, int], None] = lambda phase, done, total: None,
) -> Report:
  """Writes `source`, which is of the layout `old`, to `destination` in the layout `new`.

  Args:
    source: the old checkpoint.
    destination: the new checkpoint's folder.
    old: layout of the model that it is of.
    new: layout of the model that is to load it.
    scan_layers: MaxText's key of that name, noted in the checkpoint.
    on_bytes: is called with "writing" or "verifying", and how many bytes of how many.

  Raises:
    FileExistsError: there is something at the destination, or what an interrupted conversion has left.
    LayoutError: the checkpoint does not fit the layouts.
    VerificationError: what was written could not be read back.
  """
  check_dtypes(source, old, new)
  todo = plan(source.shapes, old, new)
  unfinished = destination.with_name(destination.name + UNFINISHED)
  for folder in (destination, unfinished):
    if folder.exists():
      raise FileExistsError(f"{folder} exists; nothing is overwritten.")
  arrays = {
      entry.path: files.NewArray(
          shape=entry.shape,
          dtype=source.arrays[entry.like].dtype,
          chunk=_chunk(entry, todo, source),
          # Orbax would want to know on which devices a jax.Array has been, where none is said to be wanted.
          kind="scalar" if source.arrays[entry.like].kind == "scalar" else "np.ndarray",
      )
      for entry in todo.entries
  }
  nbytes = sum(math.prod(new.shape) * new.dtype.itemsize for new in arrays.values())
  written: Checksums = defaultdict(int)
  try:
    files.create(
        unfinished,
        source,
        arrays,
        scan_layers=scan_layers,
        fill=lambda stores: _copy(source, todo, old, stores, written, lambda done: on_bytes("writing", done, nbytes)),
    )
    found = _read_back(unfinished, source, todo, old, lambda done: on_bytes("verifying", done, nbytes))
    if wrong := sorted(
        f"{name} of layer {layer}" for (name, layer), sum_ in written.items() if found[name, layer] != sum_
    ):
      raise VerificationError(f"{unfinished}: read back other values than were written for {', '.join(wrong[:5])}.")
    unfinished.rename(destination)
  except BaseException:
    shutil.rmtree(unfinished, ignore_errors=True)
    raise
  return Report(
      arrays=len(arrays),
      nbytes=nbytes,
      layers=tuple(_checksum(written, layer) for layer in range(new.number_of_layers)),
      rest=_checksum(written, None),
      dropped=tuple("/".join(path) for path in todo.dropped),
  )


def check_dtypes(source: files.Checkpoint, old: Layout, new: Layout) -> None:
  """Raises LayoutError if a checkpoint has integers where the model has floating-point numbers, or the other way round.

  A wider or narrower dtype is what a run may be continued with.
  """
  for entry in plan(source.shapes, old, new).entries:
    found, wanted = source.arrays[entry.like].dtype, entry.leaf.is_floating if entry.leaf is not None else None
    if wanted is not None and jnp.issubdtype(found, jnp.floating) != wanted:
      kind = "floating-point numbers" if wanted else "integers"
      raise LayoutError(f"{'/'.join(entry.like)} is {found} in the checkpoint, where the model has {kind}.")


def _chunk(entry, todo: Plan, source: files.Checkpoint) -> tuple[int, ...]:
  """One layer, and of that as much as a chunk of the old checkpoint has."""
  like = source.arrays[entry.like]
  move = next(move for move in todo.moves[entry.like] if move.path == entry.path)
  rest = iter(size for size, at in zip(like.chunk, move.source, strict=True) if isinstance(at, slice))
  return tuple(max(1, next(rest)) if isinstance(at, slice) else 1 for at in move.target)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Piece:
  """One layer's part of one chunk.

  Attributes:
    name: what it is, in either layout.
    layer: its layer.
    offset: where it begins within what the array holds of that layer.
    path: the new array.
    source: its place within the chunk.
    target: its place in the new array.
  """

  name: str
  layer: int | None
  offset: tuple[int, ...]
  path: Path
  source: Index
  target: Index


def _chunks(source: files.Checkpoint, todo: Plan, old: Layout) -> Iterator[tuple[Path, Index, list[_Piece]]]:
  """Each chunk of the old checkpoint, and where its parts go."""
  for path, array in source.arrays.items():
    moves = todo.moves[path]
    name = _name(path, old)
    grid = [range(0, size, chunk) for size, chunk in zip(array.shape, array.chunk, strict=True)]
    for starts in itertools.product(*grid):
      box = tuple(
          slice(start, min(start + chunk, size))
          for start, chunk, size in zip(starts, array.chunk, array.shape, strict=True)
      )
      pieces = [_piece(name, move, box) for move in moves if _meets(move.source, box)]
      if pieces:
        yield path, box, pieces


def _meets(index: Index, box: Index) -> bool:
  return all(isinstance(at, slice) or part.start <= at < part.stop for at, part in zip(index, box, strict=True))


def _piece(name: str, move: Move, box: Index) -> _Piece:
  parts = [part for at, part in zip(move.source, box, strict=True) if isinstance(at, slice)]
  rest = iter(parts)
  return _Piece(
      name=name,
      layer=move.layer,
      offset=tuple(part.start for part in parts),
      path=move.path,
      source=tuple(
          slice(None) if isinstance(at, slice) else at - part.start for at, part in zip(move.source, box, strict=True)
      ),
      target=tuple(next(rest) if isinstance(at, slice) else at for at in move.target),
  )


def _name(path: Path, old: Layout) -> str:
  """An array's name without where the layout has it, so that both layouts have the same."""
  for start in range(len(path)):
    leaf = old.by_path.get(path[start:])
    if leaf is not None and leaf.name is not None:
      return "/".join((*path[:start], *leaf.name))
  return "/".join(path)


def _copy(
    source: files.Checkpoint,
    todo: Plan,
    old: Layout,
    stores: Mapping[Path, Any],
    checksums: Checksums,
    on_bytes: Callable[[int], None],
) -> None:
  """Copies everything, and adds up checksums of it."""
  pending: deque[tuple[int, Any]] = deque()
  in_flight = done = 0

  def finish():
    nonlocal in_flight, done
    size, future = pending[0]
    future.result()
    pending.popleft()
    in_flight, done = in_flight - size, done + size
    on_bytes(done)

  try:
    for path, box, pieces in _chunks(source, todo, old):
      with files.reading(source.root):
        values = source.arrays[path].store[box].read().result()
      for piece in pieces:
        part = np.asarray(values[piece.source], order="C")
        _add(checksums, piece, part)
        while pending and in_flight + part.nbytes > IN_FLIGHT:
          finish()
        pending.append((part.nbytes, stores[piece.path][piece.target].write(part)))
        in_flight += part.nbytes
      del values, part  # before the next chunk is read
    while pending:
      finish()
  except BaseException:
    for _, future in pending:
      future.exception()  # waits: what is still being written would come back after it is removed
    raise


def _read_back(
    root: pathlib.Path, source: files.Checkpoint, todo: Plan, old: Layout, on_bytes: Callable[[int], None]
) -> Checksums:
  """The checksums of what is on disk now."""
  checksums: Checksums = defaultdict(int)
  arrays = files.open_checkpoint(root).arrays
  for entry in todo.entries:
    if entry.path not in arrays or arrays[entry.path].shape != entry.shape:
      raise VerificationError(f"{root}: {'/'.join(entry.path)} was not written with the shape {list(entry.shape)}.")
  done = 0
  for _, _, pieces in _chunks(source, todo, old):
    for piece in pieces:
      part = arrays[piece.path].store[piece.target].read().result()
      _add(checksums, piece, part)
      done += part.nbytes
    on_bytes(done)
  return checksums


def _add(checksums: Checksums, piece: _Piece, part: np.ndarray) -> None:
  """Adds a part's checksum to its layer's. A sum does not depend on the order in which parts come."""
  found = hashlib.blake2b(repr((piece.name, piece.offset, part.shape)).encode(), digest_size=16)
  found.update(np.asarray(part, order="C").reshape(-1).view(np.uint8))
  key = piece.name, piece.layer
  checksums[key] = (checksums[key] + int.from_bytes(found.digest())) % _MODULUS


def _checksum(checksums: Checksums, layer: int | None) -> str:
  return f"{sum(value for (_, of), value in checksums.items() if of == layer) % _MODULUS:032x}"


def is_same(source: files.Checkpoint, old: Layout, new: Layout) -> bool:
  """Whether a checkpoint of one layout is one of the other."""
  todo = plan(source.shapes, old, new)
  return (
      all(move.path == path and move.source == move.target for path, moves in todo.moves.items() for move in moves)
      and {entry.path: entry.shape for entry in todo.entries} == source.shapes
  )


__all__ = ["LayoutError", "Report", "VerificationError", "convert", "is_same"]

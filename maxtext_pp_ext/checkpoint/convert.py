# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Rewrites a checkpoint in another layout, a piece at a time, and reads it back.

Each chunk of the old checkpoint is read once, and its layers go where the new layout has them. A new chunk holds one
layer, and as much of it as an old chunk, so each new chunk is written once, whole. Memory holds a few chunks: of one
parameter at most, or of one device's shard of it if the run wrote shards.

The new one is written into a folder that Orbax takes for unfinished, compared there with what was read, and then renamed.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
import contextlib
import ctypes
import dataclasses
import functools
import hashlib
import itertools
import pathlib
import shutil
from typing import Any

import jax.numpy as jnp
import numpy as np

from maxtext_pp_ext.checkpoint import files, places
from maxtext_pp_ext.checkpoint.layout import Index, Layout, LayoutError, Path
from maxtext_pp_ext.checkpoint.moves import Move, Plan, plan

# Bytes of pieces that are written at the same time. A larger piece is written alone.
IN_FLIGHT = 32 * 2**20
_MODULUS = 2**128
_M_MMAP_THRESHOLD = -3  # in glibc's malloc.h

Checksums = dict[tuple[str, int | None], int]


def hold_no_freed_memory() -> None:
  """Makes the C library give large blocks back when they are freed; this affects the whole process.

  Otherwise glibc adapts its threshold to freed blocks, and soon serves all blocks from heaps that do not shrink.
  """
  with contextlib.suppress(AttributeError, OSError):  # another C library
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 2**16)


class VerificationError(RuntimeError):
  """The values read back differ from those written; the new checkpoint has been removed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
  arrays: int  # number of arrays in the new checkpoint
  nbytes: int  # their size in bytes, uncompressed
  layers: tuple[str, ...]  # checksum of each layer, over all of its values in the checkpoint
  rest: str  # checksum of all else
  dropped: tuple[str, ...]  # random state of layers that has no place in the new model, which draws its own


def convert(
    source: files.Checkpoint,
    destination: pathlib.Path,
    old: Layout,
    new: Layout,
    *,
    scan_layers: bool,
    on_bytes: Callable[[str, int, int], object] = lambda *_: None,
) -> Report:
  """Writes `source`, whose model has the layout `old`, to the folder `destination` in the layout `new`.

  `scan_layers` is MaxText's key, noted in the checkpoint. `on_bytes` is called with "writing" or "verifying", the bytes
  done, and their total. Raises FileExistsError as `places.check_absent` does, LayoutError if the checkpoint does not fit
  the layouts, and VerificationError.
  """
  check_dtypes(source, old, new)
  todo = plan(source.shapes, old, new)
  places.check_absent(destination)
  folder = places.folder_of(destination)
  arrays = [
      files.NewArray(
          path=entry.path,
          shape=entry.shape,
          dtype=source.arrays[entry.like].dtype,
          chunk=_chunk(entry, todo, source),
          # Orbax would want to know on which devices a jax.Array has been, where none is said to be wanted.
          kind="scalar" if source.arrays[entry.like].kind == "scalar" else "np.ndarray",
      )
      for entry in todo.entries
  ]
  nbytes = sum(array.nbytes for array in arrays)
  written: Checksums = defaultdict(int)
  folder.mkdir(parents=True)
  try:
    with places.marked(folder):
      chunks = functools.partial(_chunks, source, todo)
      copy = functools.partial(_copy, source, chunks, written, lambda done: on_bytes("writing", done, nbytes))
      files.create(folder, source, arrays, scan_layers=scan_layers, fill=copy)
      found = _read_back(folder, todo, chunks, lambda done: on_bytes("verifying", done, nbytes))
      different = [key for key, sum_ in written.items() if found[key] != sum_]
      if wrong := sorted(f"{name} of layer {layer}" for name, layer in different):
        raise VerificationError(f"{folder}: the values read back differ from those written for {', '.join(wrong[:5])}.")
    folder.rename(destination)
  except BaseException:
    shutil.rmtree(folder, ignore_errors=True)
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

  Another width is allowed: a run may continue in a wider or narrower dtype.
  """
  for entry in plan(source.shapes, old, new).entries:
    found, wanted = source.arrays[entry.like].dtype, entry.leaf and entry.leaf.is_floating
    if wanted is not None and jnp.issubdtype(found, jnp.floating) != wanted:
      kind = "floating-point numbers" if wanted else "integers"
      raise LayoutError(f"{'/'.join(entry.like)} is {found} in the checkpoint, but the model has {kind}.")


def _chunk(entry, todo: Plan, source: files.Checkpoint) -> tuple[int, ...]:
  """Returns the shape of a new chunk: one layer, and as much of it as a chunk of the old checkpoint has."""
  like = source.arrays[entry.like]
  move = next(move for move in todo.moves[entry.like] if move.path == entry.path)
  rest = iter(size for size, at in zip(like.chunk, move.source, strict=True) if isinstance(at, slice))
  return tuple(max(1, next(rest)) if isinstance(at, slice) else 1 for at in move.target)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Piece:
  """One layer's part of one chunk."""

  move: Move
  offset: tuple[int, ...]  # where it begins within what the array holds of that layer
  source: Index  # its place within the chunk
  target: Index  # its place in the new array


_Chunk = tuple[Path, Index, list[_Piece]]


def _chunks(source: files.Checkpoint, todo: Plan) -> Iterator[_Chunk]:
  """Yields each chunk of the old checkpoint, and where its parts go."""
  for path, array in source.arrays.items():
    along = [
        [slice(start, min(start + chunk, size)) for start in range(0, size, chunk)]
        for size, chunk in zip(array.shape, array.chunk, strict=True)
    ]
    for box in itertools.product(*along):
      if pieces := [_piece(move, box) for move in todo.moves[path] if _meets(move.source, box)]:
        yield path, box, pieces


def _meets(index: Index, box: Index) -> bool:
  return all(isinstance(at, slice) or part.start <= at < part.stop for at, part in zip(index, box, strict=True))


def _piece(move: Move, box: Index) -> _Piece:
  along = list(zip(move.source, box, strict=True))
  parts = [part for at, part in along if isinstance(at, slice)]
  rest = iter(parts)
  return _Piece(
      move=move,
      offset=tuple(part.start for part in parts),
      source=tuple(slice(None) if isinstance(at, slice) else at - part.start for at, part in along),
      target=tuple(next(rest) if isinstance(at, slice) else at for at in move.target),
  )


def _copy(
    source: files.Checkpoint,
    chunks: Callable[[], Iterator[_Chunk]],
    checksums: Checksums,
    on_bytes: Callable[[int], object],
    stores: Mapping[Path, Any],
) -> None:
  """Copies everything into `stores`, and adds up its checksums."""
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
    for path, box, pieces in chunks():
      with files.reading(source.root):
        values = source.arrays[path].store[box].read().result()
      for piece in pieces:
        part = np.asarray(values[piece.source], order="C")
        _add(checksums, piece, part)
        while pending and in_flight + part.nbytes > IN_FLIGHT:
          finish()
        pending.append((part.nbytes, stores[piece.move.path][piece.target].write(part)))
        in_flight += part.nbytes
      del values, part  # before the next chunk is read
    while pending:
      finish()
  except BaseException:
    for _, future in pending:
      future.exception()  # waits: a pending write would recreate files after their removal
    raise


def _read_back(
    root: pathlib.Path, todo: Plan, chunks: Callable[[], Iterator[_Chunk]], on_bytes: Callable[[int], object]
) -> Checksums:
  """Returns the checksums of what is on disk now."""
  checksums: Checksums = defaultdict(int)
  arrays = files.open_checkpoint(root).arrays
  for entry in todo.entries:
    if entry.path not in arrays or arrays[entry.path].shape != entry.shape:
      raise VerificationError(f"{root}: {'/'.join(entry.path)} was not written with the shape {list(entry.shape)}.")
  done = 0
  for _, _, pieces in chunks():
    for piece in pieces:
      part = arrays[piece.move.path].store[piece.target].read().result()
      _add(checksums, piece, part)
      done += part.nbytes
    on_bytes(done)
  return checksums


def _add(checksums: Checksums, piece: _Piece, part: np.ndarray) -> None:
  """Adds a part's checksum to its layer's. A sum does not depend on the order in which parts come."""
  found = hashlib.blake2b(repr((piece.move.name, piece.offset, part.shape)).encode(), digest_size=16)
  found.update(np.asarray(part, order="C").reshape(-1).view(np.uint8))
  key = piece.move.name, piece.move.layer
  checksums[key] = (checksums[key] + int.from_bytes(found.digest())) % _MODULUS


def _checksum(checksums: Checksums, layer: int | None) -> str:
  return f"{sum(value for (_, of), value in checksums.items() if of == layer) % _MODULUS:032x}"


def is_same(source: files.Checkpoint, old: Layout, new: Layout) -> bool:
  todo = plan(source.shapes, old, new)
  stay = (move.path == path and move.source == move.target for path, moves in todo.moves.items() for move in moves)
  return all(stay) and {entry.path: entry.shape for entry in todo.entries} == source.shapes

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Where each layer is in the arrays of a model.

Layers are numbered in the order in which they run, so a layer has the same number in all layouts of a model. The axes
that count layers may be anywhere: MaxText's pipelines have `[repeat, stage, …]`, scanned layers are stacked along
`param_scan_axis`, and one array may have both, as in `[repeat, stage, embed, layer of the stage, mlp]`.
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import functools
import itertools
from typing import Any

Path = tuple[str, ...]
Shape = tuple[int, ...]
# An integer for each axis that counts layers, a full slice for each other axis.
Index = tuple[Any, ...]


class LayoutError(ValueError):
  """Two layouts, or a layout and a checkpoint, do not belong to the same model; the message names where they differ."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerAxis:
  axis: int  # where it is in the array
  stride: int  # number of layers between successive entries


@dataclasses.dataclass(frozen=True, kw_only=True)
class Leaf:
  """One array of a model."""

  path: Path  # its path in the model
  shape: Shape
  name: Path | None = None  # its path within a layer; None for an array that belongs to no decoder layer
  first: int = 0  # number of the first layer in it
  axes: tuple[LayerAxis, ...] = ()  # the axes that count layers; empty if it holds one layer
  is_random_state: bool = False  # a random key or counter. MaxText draws a new one if a checkpoint has none.
  is_floating: bool | None = None  # whether its numbers are floating-point; None if that is not known

  @property
  def of_layer(self) -> Shape:
    """Shape of its part of each layer."""
    counting = {axis.axis for axis in self.axes}
    return tuple(size for axis, size in enumerate(self.shape) if axis not in counting)

  def layers(self) -> Iterator[tuple[int, Index]]:
    """Each layer's number, and its place in the array."""
    for at in itertools.product(*(range(self.shape[axis.axis]) for axis in self.axes)):
      number, index = self.first, list[Any]([slice(None)]) * len(self.shape)
      for i, axis in zip(at, self.axes, strict=True):
        number += i * axis.stride
        index[axis.axis] = i
      yield number, tuple(index)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
  """All arrays of a model."""

  leaves: tuple[Leaf, ...]
  description: str  # the layout in words, for messages

  def __post_init__(self):
    seen = set()
    for name, leaf in self._of_layers:
      for layer, _ in leaf.layers():
        if (layer, name) in seen:
          raise LayoutError(f"{self.description}: layer {layer} has {'/'.join(name)} more than once.")
        seen.add((layer, name))

  @property
  def _of_layers(self) -> Iterator[tuple[Path, Leaf]]:
    return ((leaf.name, leaf) for leaf in self.leaves if leaf.name is not None)

  @functools.cached_property
  def by_path(self) -> Mapping[Path, Leaf]:
    return {leaf.path: leaf for leaf in self.leaves}

  @functools.cached_property
  def of_layer(self) -> Mapping[Path, frozenset[Shape]]:
    """Path within a layer -> the shapes that layers have there. They are the same in every layout of the model."""
    found: dict[Path, frozenset[Shape]] = {}
    for name, leaf in self._of_layers:
      found[name] = found.get(name, frozenset()) | {leaf.of_layer}
    return found

  @property
  def number_of_layers(self) -> int:
    return 1 + max((layer for _, leaf in self._of_layers for layer, _ in leaf.layers()), default=-1)


def axes_of_stack(stacks: Sequence[int | None], ndim: int) -> tuple[int, ...]:
  """Returns where the axes of nested stacks are in an array of `ndim` axes, these included.

  `stacks` has for each stack, from the outermost to the innermost, the axis along which it stacks, or None for the first.
  An axis beyond the array's rank becomes its last, as in MaxText.
  """
  places: list[int] = []
  rank = ndim - len(stacks)
  for axis in reversed(stacks):
    at = 0 if axis is None else min(axis, rank)
    places = [at, *(p + (p >= at) for p in places)]
    rank += 1
  return tuple(places)

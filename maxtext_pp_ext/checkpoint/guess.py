# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Infers how a checkpoint's model was pipelined from the paths and shapes of its arrays.

The results are guesses; `host.models.layouts` checks them against the model itself.
"""

import collections
from collections.abc import Collection, Iterator, Mapping
import math
import re
from typing import Any

from maxtext_pp_ext.checkpoint.layout import axes_of_stack, Path, Shape

_PIPELINE = ("pipeline_module", "layers")
_OUTSIDE = re.compile(r"(moe_)?layers_outside_pipeline(_\d+)?")
_SINGLE = re.compile(r"(dense_|moe_)?layers(_outside_pipeline)?_\d+")


def candidates(
    shapes: Mapping[Path, Shape],
    *,
    layers: int,
    scan_layers: bool | None,
    of_layer: Mapping[Path, Collection[Shape]],
) -> Iterator[dict[str, Any]]:
  """Yields values of MaxText's keys that would explain a checkpoint with arrays of these shapes, the likeliest first.

  The model has `layers` layers of the kind that pipelines hold. `scan_layers` is the checkpoint's note of this key, None
  without one. `of_layer`: path within a layer -> its possible shapes, in whatever layout. From these follows
  `param_scan_axis`. It is not among the values if layers are not stacked along it, or no axis explains all parameters.
  """
  singles = any(_SINGLE.fullmatch(part) for path in shapes for part in _in_decoder(path)[:1])
  scans = [scan_layers] if scan_layers is not None else [not singles, singles]
  parameters = {path: shape for path, shape in shapes.items() if path[:1] == ("params",)}
  found = list(_pipelines(parameters, layers, of_layer)) or [{"ici_pipeline_parallelism": 1}]
  unlikely = []
  for values in (of_pipeline | {"scan_layers": scan} for scan in scans for of_pipeline in found):
    axes = _scan_axes(parameters, of_layer, repeated=values.get("num_pipeline_repeats", 1) > 1)
    if axes is None:
      yield values
    elif axes:
      yield from (values | {"param_scan_axis": axis} for axis in axes)
    else:
      unlikely.append(values)
  yield from unlikely


def _pipelines(shapes: Mapping[Path, Shape], layers: int, of_layer: Collection[Path]) -> Iterator[dict[str, Any]]:
  inside = {path: shape for path, shape in shapes.items() if _in_decoder(path)[:2] == _PIPELINE}
  outside = {path: shape for path, shape in shapes.items() if _OUTSIDE.fullmatch("".join(_in_decoder(path)[:1]))}
  left = _layers_outside(inside, outside, layers, of_layer)
  if not inside or left is None:
    return
  leading = {shape[:2] for shape in inside.values()}
  several = leading if len(leading) == 1 and len(min(leading)) == 2 else set()
  scanned = any("scanned_layers" in path for path in inside)
  for repeats, stages in [*several, *((1, size) for size in {shape[0] for shape in leading})]:
    per_stage, remainder = divmod(layers - left, repeats * stages)
    if per_stage > scanned and not remainder and stages > 1:
      yield {
          "ici_pipeline_parallelism": stages,
          "num_pipeline_repeats": repeats,
          "num_layers_per_pipeline_stage": per_stage,
          "pipeline_parallel_layers": layers - left,
          "scan_layers_per_stage": scanned,
      }


def _layers_outside(
    inside: Mapping[Path, Shape], outside: Mapping[Path, Shape], layers: int, of_layer: Collection[Path]
) -> int | None:
  """Returns how many layers are outside of the pipeline; None if the arrays do not tell.

  Layers inside and outside are of one kind, so their numbers are proportional to the sizes of their arrays of one name.
  Most names count, since some arrays may lack.
  """
  if not outside:
    return 0
  within, beside = (_sizes(shapes, of_layer) for shapes in (inside, outside))
  shares = [divmod(layers * beside[name], within[name] + beside[name]) for name in within.keys() & beside.keys()]
  found = collections.Counter(left for left, remainder in shares if not remainder)
  return found.most_common(1)[0][0] if found else None


def _sizes(shapes: Mapping[Path, Shape], of_layer: Collection[Path]) -> collections.Counter[Path]:
  """Path within a layer -> the numbers of elements there, added up."""
  sizes = collections.Counter[Path]()
  for path, shape in shapes.items():
    if name := _name(path, of_layer):
      sizes[name] += math.prod(shape)
  return sizes


def _name(path: Path, of_layer: Collection[Path]) -> Path | None:
  """The array's path within its layer."""
  return next((path[start:] for start in range(len(path)) if path[start:] in of_layer), None)


def _scan_axes(
    shapes: Mapping[Path, Shape], of_layer: Mapping[Path, Collection[Shape]], *, repeated: bool
) -> list[int] | None:
  """Returns each `param_scan_axis` that explains the shapes of all parameters; None if no scan stacks any of them."""
  known = []
  for path, shape in shapes.items():
    if name := _name(path, of_layer):
      known.append((shape, (1 + repeated) * (_in_decoder(path)[:2] == _PIPELINE), of_layer[name]))
  fits = lambda axis: all(any(_stacks(shape, stages, each, axis) for each in own) for shape, stages, own in known)
  if not any(len(shape) > stages + max(map(len, own)) for shape, stages, own in known) and fits(0):
    return None
  # An axis beyond a layer's rank is its last.
  return [axis for axis in range(1 + max((len(each) for _, _, own in known for each in own), default=-1)) if fits(axis)]


def _stacks(shape: Shape, stages: int, own: Shape, axis: int) -> bool:
  """Returns whether an array has this shape within a layer if its scans stack along this axis."""
  if (scans := len(shape) - len(own) - stages) < 0:
    return False
  counting = axes_of_stack([None] * stages + [axis] * scans, len(shape))
  return tuple(size for at, size in enumerate(shape) if at not in counting) == own


def _in_decoder(path: Path) -> Path:
  return path[path.index("decoder") + 1 :] if "decoder" in path else ()

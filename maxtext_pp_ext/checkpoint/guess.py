# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Infers how a checkpoint's model was pipelined from the paths and shapes of its arrays.

The results are guesses; `host.models.layouts` checks them against the model itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
import math
import re
from typing import Any

from maxtext_pp_ext.checkpoint.layout import Path, Shape

_PIPELINE = ("pipeline_module", "layers")
_OUTSIDE = re.compile(r"(moe_)?layers_outside_pipeline(_\d+)?")
_SINGLE = re.compile(r"(dense_|moe_)?layers(_outside_pipeline)?_\d+")


def candidates(shapes: Mapping[Path, Shape], *, layers: int, scan_layers: bool | None) -> Iterator[dict[str, Any]]:
  """Yields values of MaxText's keys that would explain a checkpoint, the likeliest first.

  Args:
    shapes: the checkpoint's arrays.
    layers: number of the model's layers of the kind that pipelines hold.
    scan_layers: the checkpoint's note of this key; None if it has none.
  """
  singles = any(_SINGLE.fullmatch(part) for path in shapes for part in _in_decoder(path)[:1])
  scans = [scan_layers] if scan_layers is not None else [not singles, singles]
  found = list(_pipelines(_of_parameters(shapes), layers)) or [{"ici_pipeline_parallelism": 1}]
  for scan in scans:
    for values in found:
      yield values | {"scan_layers": scan}


def _pipelines(shapes: Mapping[Path, Shape], layers: int) -> Iterator[dict[str, Any]]:
  inside = {path: shape for path, shape in shapes.items() if _in_decoder(path)[:2] == _PIPELINE}
  if not inside:
    return
  outside = [shape for path, shape in shapes.items() if _OUTSIDE.fullmatch("".join(_in_decoder(path)[:1]))]
  # Layers inside and outside are of one kind, so their numbers are proportional to their sizes.
  size_inside, size_outside = (sum(map(math.prod, of)) for of in (inside.values(), outside))
  left, remainder = divmod(layers * size_outside, size_inside + size_outside)
  if remainder:
    return
  leading = {shape[:2] for shape in inside.values()}
  several = leading if len(leading) == 1 and len(min(leading)) == 2 else set()
  for repeats, stages in [*several, *((1, size) for size in {shape[0] for shape in leading})]:
    per_stage, remainder = divmod(layers - left, repeats * stages)
    if per_stage and not remainder and stages > 1:
      yield {
          "ici_pipeline_parallelism": stages,
          "num_pipeline_repeats": repeats,
          "num_layers_per_pipeline_stage": per_stage,
          "pipeline_parallel_layers": layers - left,
          "scan_layers_per_stage": any("scanned_layers" in path for path in inside),
      }


def _of_parameters(shapes: Mapping[Path, Shape]) -> Mapping[Path, Shape]:
  return {path: shape for path, shape in shapes.items() if path[:1] == ("params",)}


def _in_decoder(path: Path) -> Path:
  return path[path.index("decoder") + 1 :] if "decoder" in path else ()

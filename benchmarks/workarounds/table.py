# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The reproducers by name, and the places of the package that name them."""

from __future__ import annotations

from collections.abc import Iterator
import pathlib
import re
from typing import Any, NamedTuple

from benchmarks.workarounds import figures, layouts, scheduling, transfers
from benchmarks.workarounds.ablations import Ablation, ABLATIONS
from benchmarks.workarounds.reproducer import Reproducer

PACKAGE = pathlib.Path(__file__).resolve().parents[2] / "maxtext_pp_ext"
_SENT: dict[str, Any] = {"figure": figures.sent, "unit": "bytes sent"}
_ALONE: dict[str, Any] = {"figure": figures.sent_alone, "unit": "bytes sent while nothing is computed"}
_COPIED: dict[str, Any] = {"figure": figures.copied, "unit": "bytes copied"}
# Where a comment may break into lines.
_GAP = r"(?:\s|#)+"
_PLACE = re.compile(rf"\blibtpu{_GAP}(\d+(?:\.\d+)+)(?:;{_GAP}benchmarks\.workarounds{_GAP}(\w+))?")

REPRODUCERS: dict[str, Reproducer | Ablation] = {
    "reduce_scatter_over_all": Reproducer(program=transfers.reduce_scatter_over_all, **_SENT),
    "reduce_scatter_along_ring": Reproducer(program=transfers.reduce_scatter_along_ring, **_SENT),
    "gather_along_ring": Reproducer(program=transfers.gather_along_ring, **_ALONE),
    "reduce_scatter_of_parts_of_tiles": Reproducer(program=transfers.reduce_scatter_of_parts_of_tiles, **_SENT),
    "reduce_scatter_of_rows": Reproducer(program=transfers.reduce_scatter_of_rows, **_SENT),
    "exchange_of_two": Reproducer(program=transfers.exchange_of_two, **_ALONE),
    "small_gather": Reproducer(program=transfers.small_gather, **_SENT),
    "gather_over_several_axes": Reproducer(program=transfers.gather_over_several_axes, **_ALONE),
    "cast_of_all_repeats": Reproducer(
        program=layouts.cast_of_all_repeats,
        figure=figures.cast_before_loops,
        unit="bytes cast before the loop",
    ),
    "order_of_parameter": Reproducer(program=layouts.order_of_parameter, **_COPIED),
    "order_of_residual": Reproducer(program=layouts.order_of_residual, **_COPIED),
    "order_of_finished_sum": Reproducer(program=layouts.order_of_finished_sum, **_COPIED),
    "order_of_weight": Reproducer(program=layouts.order_of_weight, **_COPIED),
    "order_of_output_projection": Reproducer(
        program=layouts.order_of_output_projection, figure=figures.cycles, unit="cycles", margin=0.2
    ),
    "order_of_all_repeats": Reproducer(program=layouts.order_of_all_repeats, **_COPIED),
    "residual_of_kernel": Reproducer(program=layouts.residual_of_kernel, **_COPIED),
    "part_of_kernel": Reproducer(program=layouts.part_of_kernel, figure=figures.cycles, unit="cycles", margin=0.2),
    "factor_of_products": Reproducer(
        program=scheduling.factor_of_products, figure=figures.exponentials, unit="exponentials computed"
    ),
    "gradients_at_the_end": Reproducer(
        program=scheduling.gradients_at_the_end,
        figure=figures.sums_behind_transfer,
        unit="gradients at the end",
    ),
    "buffer_written_twice": Reproducer(
        program=scheduling.buffer_written_twice,
        figure=figures.rematerialised,
        unit="operations rematerialised",
    ),
    **ABLATIONS,
}


class Place(NamedTuple):
  """Where a comment or docstring names a version of libtpu."""

  file: str  # below the package
  line: int
  libtpu: str  # the version
  reproducer: str | None  # the name; None if there is none

  def __str__(self) -> str:
    return f"{self.file}:{self.line}"


def places(package: pathlib.Path = PACKAGE) -> Iterator[Place]:
  """Yields each of the package, in the order of files and lines."""
  for file in sorted(package.rglob("*.py")):
    text = file.read_text(encoding="utf-8")
    for match in _PLACE.finditer(text):
      line = text.count("\n", 0, match.start()) + 1
      yield Place(str(file.relative_to(package)), line, match[1], match[2])

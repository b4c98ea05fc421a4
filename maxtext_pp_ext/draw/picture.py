# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Draws a schedule as a picture: stages × iterations, coloured by repeat, and below it the double buffer of one stage."""

import operator
import pathlib
from typing import Any

import matplotlib
from matplotlib import patches
from matplotlib.collections import PatchCollection
from matplotlib.figure import Figure

from maxtext_pp_ext.draw import text
from maxtext_pp_ext.schedule import double_buffer, GatherPolicy, Schedule

# With more iterations than this, cells have no numbers: they would be too small to read.
_MOST_CELLS_WITH_NUMBERS = 90
_ROWS_OF_DOUBLE_BUFFER = ["works on", "current", "buffer", "gradient"]  # the last one in backward only
_ARRIVING = {
    "forward": "chunks of the next repeat arrive in the next buffer",
    "backward": "chunks of the repeat before arrive in the next buffer, chunks of the last gradient are reduced",
}
# Column, row, the share that is filled, from below, and its colour.
_Cell = tuple[int, int, float, Any]


def draw(
    schedule: Schedule, path: pathlib.Path, *, stage: int, gather_policy: GatherPolicy | None = GatherPolicy.REPEAT
) -> None:
  """Writes the picture as SVG or PNG, by the file's suffix; an existing file is overwritten.

  The double buffer is that of `stage`, with weights kept as `gather_policy` says; some policies have none to draw.
  """
  iterations = schedule.iterations
  without = text.without_double_buffer(gather_policy)
  heights = [0.24 * max(schedule.stages, 4), *([] if without else [0.24 * 3 + 0.2, 0.24 * 4 + 0.2])]
  figure = Figure(figsize=(min(max(9.0, 0.2 * iterations + 1.8), 16.0), sum(heights) + 3.1), layout="constrained")
  axes = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
  colors = _colors(schedule.repeats)
  numbers = iterations <= _MOST_CELLS_WITH_NUMBERS
  _schedule(axes[0], schedule, colors, numbers)
  if without is None:
    _double_buffer(axes[1], schedule, "forward", double_buffer.forward(schedule, stage), stage, colors, numbers)
    _double_buffer(axes[2], schedule, "backward", double_buffer.backward(schedule, stage), stage, colors, numbers)
  figure.suptitle("\n".join(filter(None, (text.title(schedule), without))), fontsize=11)
  legend = [patches.Patch(color=color, label=f"repeat {repeat}") for repeat, color in enumerate(colors[:12])]
  legend.append(patches.Patch(facecolor="white", edgecolor="0.7", label="bubble, or empty"))
  figure.legend(handles=legend, loc="outside lower center", ncols=min(len(legend), 9), frameon=False, fontsize=8)
  figure.savefig(path, dpi=150)


def _colors(repeats: int) -> list:
  """One colour per repeat. Up to 10 repeats have colours that are easy to tell apart."""
  colormap = matplotlib.colormaps["tab10" if repeats <= 10 else "tab20"]
  return [colormap(i % colormap.N) for i in range(repeats)]


def _schedule(axes, schedule: Schedule, colors: list, numbers: bool) -> None:
  every = range(schedule.stages)
  cells = [cell for s in every for cell in _working(axes, double_buffer.forward(schedule, s), s, colors, numbers)]
  _finish(axes, cells, schedule, range(schedule.iterations), [str(s) for s in every])
  axes.set_title("Who works on what, forward" + (" (numbers: microbatches)" if numbers else ""), fontsize=9, loc="left")
  axes.set_ylabel("stage", fontsize=8)


def _double_buffer(axes, schedule, direction, steps, stage, colors, numbers) -> None:
  cells = _working(axes, steps, 0, colors, numbers)
  for column, step in enumerate(steps):
    cells.append((column, 1, 1.0, colors[step.current]))
    if step.chunk is not None:
      share = (step.chunk + 1) / schedule.microbatches
      if step.arriving is not None:
        cells.append((column, 2, share, colors[step.arriving]))
      if step.reducing is not None:
        cells.append((column, 3, 1 - share + 1 / schedule.microbatches, colors[step.reducing]))
    if step.advances:
      axes.plot([column + 1, column + 1], [0.55, 2.95], color="black", linewidth=1.2, zorder=3)
  rows = _ROWS_OF_DOUBLE_BUFFER if direction == "backward" else _ROWS_OF_DOUBLE_BUFFER[:-1]
  _finish(axes, cells, schedule, [step.iteration for step in steps], rows)
  title_of_axes = (
      f"The double buffer of stage {stage}, {direction}: {_ARRIVING[direction]}; at a black line it becomes the current "
      "buffer, and what was in it is released"
  )
  axes.set_title(title_of_axes, fontsize=9, loc="left", wrap=True)


def _working(axes, steps: list[double_buffer.Step], row: int, colors: list, numbers: bool) -> list[_Cell]:
  """The cells of a row of the repeats that a stage works on. If `numbers`, writes the microbatches into them."""
  cells: list[_Cell] = []
  for column, step in enumerate(steps):
    if step.repeat is None:
      continue
    cells.append((column, row, 1.0, colors[step.repeat]))
    if numbers:
      where = {"ha": "center", "va": "center", "clip_on": True}
      axes.text(column + 0.5, row + 0.95, str(step.microbatch), fontsize=5.5, color="white", **where)
  return cells


def _rectangles(cells: list[_Cell], merge: bool) -> tuple[list, list]:
  """Rectangles and their colours. If `merge`, equal neighbours in a row become one rectangle."""
  found: list[list] = []
  for column, row, share, color in sorted(cells, key=operator.itemgetter(1, 0)):
    last = found[-1] if found else None
    if merge and last and last[0] + last[1] == column and last[2:] == [row, share, color]:
      last[1] += 1
    else:
      found.append([column, 1, row, share, color])
  shapes = [
      patches.Rectangle((column, row + 0.5 + 0.9 * (1 - share)), count, 0.9 * share)
      for column, count, row, share, _ in found
  ]
  return shapes, [color for *_, color in found]


def _finish(axes, cells: list[_Cell], schedule: Schedule, iterations, rows: list[str]) -> None:
  fine = schedule.iterations <= 2 * _MOST_CELLS_WITH_NUMBERS
  shapes, facecolors = _rectangles(cells, merge=not fine)
  axes.add_collection(PatchCollection(shapes, facecolors=facecolors, edgecolors="white", linewidths=0.5 if fine else 0.0))
  axes.set_xlim(0, len(iterations))
  axes.set_ylim(len(rows) + 0.45, 0.45)
  axes.set_yticks([row + 0.95 for row in range(len(rows))], rows, fontsize=7)
  step = next(step for step in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 10**6) if len(iterations) / step <= 40)
  ticks = [column for column in range(len(iterations)) if iterations[column] % step == 0]
  axes.set_xticks([column + 0.5 for column in ticks], [str(iterations[column]) for column in ticks], fontsize=7)
  axes.set_xlabel("iteration", fontsize=8)
  axes.tick_params(length=2)
  axes.spines[["top", "right"]].set_visible(False)

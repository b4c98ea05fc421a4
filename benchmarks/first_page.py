# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Draws what README.md opens with: what a step takes without a pipeline, with the window, and with pipelines.

  python -m benchmarks.first_page      docs/images/seconds.svg, from results/compiler_figures.json

Of each implementation that is the fastest row of a shape, whatever its remat policy and its XLA flags.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
import pathlib
from typing import Any, NamedTuple

from benchmarks import compile_step, shapes, tables

PICTURE = pathlib.Path(__file__).resolve().parents[1] / "docs" / "images" / "seconds.svg"
KINDS = ("no pipeline", "window", "pipeline", "MaxText's own pipeline")


class Row(NamedTuple):
  """A model and chips, with the implementation of each kind."""

  title: str
  shape: str
  implementations: Sequence[str]


ROWS = (
    Row("Llama 3 70B, 128 chips of v5p", "llama3-70b", ("none", "window", "circular_bsw", "host plain")),
    Row("Mixtral 8x7B, 32 chips of v5p", "mixtral-8x7b-dropless", ("none", "window", "circular_bsw", "host BSW")),
    Row("Llama 3 8B, 8 slices of v6e-8", "llama3-8b-8-slices", ("none", "window", "circular_bsw", "host plain")),
)
# What a step's seconds go to, and the colour of each; they add up.
_PARTS = {
    "compute": "#4477aa",
    "bubbles": "#ccbb44",
    "waiting, mostly for the network": "#cc6677",
}


def best(results: Mapping[str, Mapping[str, Any]], shape: str, implementation: str) -> dict[str, Any]:
  """The fastest row of an implementation: its figures, of which `projection` has the seconds."""
  rows = results[shape].items()
  projected = [row for name, row in rows if shapes.implementation_of(name) == implementation and "projection" in row]
  return min(projected, key=lambda row: row["projection"]["step_s"])


def parts(projection: Mapping[str, Any]) -> list[float]:
  """The seconds of a step by `_PARTS`."""
  compute, bubbles = projection["compute_s"], projection["bubbles_s"] or 0.0
  return [compute - bubbles, bubbles, projection["step_s"] - compute]


def main(argv: list[str] | None = None) -> None:
  parser = argparse.ArgumentParser(prog="python -m benchmarks.first_page", description=__doc__.splitlines()[0])
  parser.add_argument("--output", type=pathlib.Path, default=PICTURE)
  draw(tables.read(compile_step.RESULTS / "compiler_figures.json"), parser.parse_args(argv).output)


def draw(results: Mapping[str, Mapping[str, Any]], file: pathlib.Path) -> None:
  """Draws bars of what a step's seconds go to, a row of each kind for each shape, into an SVG file."""
  import matplotlib

  matplotlib.use("Agg")
  from matplotlib import pyplot

  # Equal pictures give equal files.
  with matplotlib.rc_context({"svg.hashsalt": "maxtext_pp_ext", "svg.fonttype": "none"}):
    figure, axes = pyplot.subplots(1, len(ROWS), figsize=(11, 2.6))
    for axis, row in zip(axes, ROWS, strict=True):
      for kind, impl in zip(KINDS, row.implementations, strict=True):
        projection, left = best(results, row.shape, impl)["projection"], 0.0
        for (name, colour), seconds in zip(_PARTS.items(), parts(projection), strict=True):
          axis.barh(kind, seconds, left=left, color=colour, label=name if (row, kind) == (ROWS[0], KINDS[0]) else None)
          left += seconds
        axis.text(left, kind, f" {left:.2f} s", va="center", fontsize=8)
      axis.set_title(row.title, fontsize=9)
      axis.invert_yaxis()
      axis.margins(x=0.2)
      axis.tick_params(labelsize=8)
      axis.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="lower center", ncols=len(_PARTS), frameon=False, fontsize=8)
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    figure.savefig(file, metadata={"Date": None})
    pyplot.close(figure)


if __name__ == "__main__":
  main()

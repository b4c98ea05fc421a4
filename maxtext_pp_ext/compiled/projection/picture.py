# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""One iteration of each direction of a simulated step, lane by lane, as a picture."""

from collections.abc import Iterator
import pathlib

from maxtext_pp_ext.compiled import reading
from maxtext_pp_ext.compiled.projection import costs, timeline, torus

_COLORS = {
    costs.PRODUCTS: "#4c78a8",
    costs.KERNELS: "#72b7b2",
    costs.OTHER: "#bab0ac",
    reading.WEIGHTS: "#f58518",
    reading.GRADIENTS: "#e45756",
    reading.ACTIVATIONS: "#54a24b",
    reading.ELSEWHERE: "#9d755d",
    "copy": "#d8d8d8",
}
_SMALL = 2e-3  # of the iteration's time; what is shorter is not drawn


def draw(run: timeline.Run, file: pathlib.Path, title: str) -> None:
  """Writes a picture, by its suffix an SVG or a PNG.

  Of the loops of a direction, that which takes most of the step; of its iterations, the one that most are like.
  """
  import matplotlib  # pylint: disable=import-outside-toplevel
  from matplotlib import patches  # pylint: disable=import-outside-toplevel
  from matplotlib.figure import Figure  # pylint: disable=import-outside-toplevel

  matplotlib.rcParams["svg.hashsalt"] = "maxtext_pp_ext"  # the same picture is the same file
  iterations = dict(steady(run))
  lanes = list(dict.fromkeys(event.lane for each in iterations.values() for event in _shown(each)))
  lanes.sort(key=lambda lane: (lane != timeline.COMPUTE, lane == costs.DMA, lane))
  figure = Figure(figsize=(11, (0.8 + 0.42 * len(lanes)) * len(iterations) + 0.9))
  axes = figure.subplots(len(iterations), 1, squeeze=False)[:, 0]
  labels = [f"links {lane}" if lane[:1] in torus.AXES and lane[1:] in torus.DIRECTIONS else lane for lane in lanes]
  used: dict[str, str] = {}
  for axis, (direction, each) in zip(axes, iterations.items(), strict=True):
    for event in _shown(each):
      kind = _kind(event)
      used[kind] = _COLORS[kind]
      span, row = (event.start * 1e3, event.seconds * 1e3), (lanes.index(event.lane) - 0.38, 0.76)
      axis.broken_barh([span], row, facecolors=_COLORS[kind], edgecolor="w", linewidth=0.3)
    axis.set_yticks(range(len(lanes)), labels, fontsize=8)
    axis.set_ylim(len(lanes) - 0.5, -0.5)
    axis.set_xlim(0, each.seconds * 1e3)
    axis.set_title(f"{direction}: {each.seconds * 1e3:.3g} ms", fontsize=9, loc="left")
    axis.tick_params(labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)
  axes[-1].set_xlabel("milliseconds, projected from the compiler's estimates", fontsize=8)
  handles = [patches.Patch(color=color, label=kind) for kind, color in used.items()]
  figure.legend(handles=handles, loc="lower center", ncols=len(handles), fontsize=8, frameon=False)
  figure.suptitle(title, fontsize=10)
  figure.tight_layout(rect=(0, 0.06, 1, 1))
  figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None, dpi=150)


def steady(run: timeline.Run) -> Iterator[tuple[str, timeline.Run]]:
  """For "forward" and "backward", the iteration that is repeated most in the longest loop of that direction.

  Loops of the pipeline come before others. A step without a loop is its own iteration, "step".
  """
  if not (loops := list(_loops(run))):
    yield "step", run
  for backward, name in ((False, "forward"), (True, "backward")):
    of_direction = [loop for loop in loops if loop.backward == backward and loop.iterations]
    if chosen := [loop for loop in of_direction if loop.in_pipeline] or of_direction:
      longest = max(chosen, key=lambda loop: loop.seconds)
      yield name, max(longest.iterations, key=lambda item: item[1])[0]


def _loops(run: timeline.Run) -> Iterator[timeline.Loop]:
  """Also those within loops of both directions."""
  for event in run.events:
    if isinstance(event, timeline.Loop):
      yield event
      if event.backward is None:
        for inner, _ in event.iterations:
          yield from _loops(inner)


def _shown(run: timeline.Run) -> Iterator[timeline.Event]:
  for event in run.events:
    if isinstance(event, timeline.Event) and event.seconds >= _SMALL * run.seconds:
      yield event


def _kind(event: timeline.Event) -> str:
  if event.lane == timeline.COMPUTE:
    return event.kind
  return payload if (payload := event.detail.get("payload")) in _COLORS else "copy"

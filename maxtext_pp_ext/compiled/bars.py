# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Draws figures of compiled train steps as bars: memory, bytes sent, FLOPs, compile time."""

import pathlib
from typing import Any

from maxtext_pp_ext.compiled import compare, reading
from maxtext_pp_ext.compiled.projection import costs

_COLORS = ("#4c78a8", "#f58518", "#54a24b", "#bab0ac", "#79706e")


def draw(rows: dict[str, dict[str, Any]], file: pathlib.Path, title: str) -> None:
  """Writes a picture, an SVG or a PNG by the file's suffix.

  Rows are results of `compare.figures`, by implementation. A row with `failure` has a note instead of bars. Raises
  ValueError if all rows have failed.
  """
  import matplotlib  # pylint: disable=import-outside-toplevel
  from matplotlib.figure import Figure  # pylint: disable=import-outside-toplevel

  matplotlib.rcParams["svg.hashsalt"] = "maxtext_pp_ext"  # equal pictures give equal files
  if all("failure" in row for row in rows.values()):
    raise ValueError("Every row has failed: there is nothing to draw.")
  computed = {at: row for at, row in enumerate(rows.values()) if "failure" not in row}
  bars = [(name, unit, {at: parts(row) for at, row in computed.items()}) for name, unit, parts in _panels()]
  panels = [panel for panel in bars if any(panel[2].values())]
  figure = Figure(figsize=(3.4 * len(panels) + 1.2, 1.7 + 0.36 * len(rows)))
  axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
  for axis, (name, unit, parts) in zip(axes, panels, strict=True):
    _panel(axis, f"{name}, {{}}{unit}" if unit else name, list(rows.values()), parts)
  axes[0].set_yticks(range(len(rows)), list(rows))
  axes[0].invert_yaxis()
  figure.suptitle(title, fontsize=10)
  figure.tight_layout()
  figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None, dpi=150)


def _panels():
  """Of each panel the title, the unit, and a function from a row to the parts of its bar: (label, value)."""
  memory = lambda row: [
      ("arguments", row["bytes"]["arguments"]),
      ("the rest of the peak", max(row["bytes"]["peak"] - row["bytes"]["arguments"], 0)),
  ]
  sent = lambda row: [(what, compare.wire_bytes(row, payload=what)) for what in (*reading.PAYLOADS, compare.UNTOLD)]
  here = lambda row: [("", row["run"]["step_s"]["median"])] if "step_s" in row.get("run", {}) else []
  return [
      ("peak memory", "B", lambda row: memory(row) if row["bytes"]["peak"] else []),
      ("temporary buffers", "B", lambda row: [("", row["bytes"]["temp"])]),
      ("sent", "B", sent),
      ("dots", "FLOP", lambda row: [("", row["dot_flops"])]),
      ("step, projected seconds", "", _projected),
      ("compile, CPU seconds", "", lambda row: [("", row["compile_cpu_s"])]),
      ("step here, seconds", "", here),
  ]


def _projected(row: dict[str, Any]) -> list[tuple[str, float]]:
  if "projection" not in row:
    return []
  parts = row["projection"]["parts"]
  compute = [(name, parts.get(name, 0.0)) for name in costs.COMPUTED]
  return [*compute, ("waiting", row["projection"]["step_s"] - sum(value for _, value in compute))]


def _panel(axis: Any, title: str, rows: list[dict[str, Any]], parts: dict[int, list[tuple[str, float]]]) -> None:
  """Draws the parts of each row, by its number; a title with a place for it has the prefix of the unit there."""
  totals = {at: sum(value for _, value in each) for at, each in parts.items() if each}
  prefix, scale = _prefix(max(totals.values())) if "{}" in title else ("", 1)
  for at, row in enumerate(rows):
    if at not in totals:
      reason = "refused" if row.get("refused") else "not computed" if at not in parts else "not run"
      axis.text(0.02, at, reason, va="center", fontsize=7, color="0.5", transform=axis.get_yaxis_transform())
      continue
    left = 0.0
    for color, (label, value) in zip(_COLORS, parts[at], strict=False):
      axis.barh(at, value / scale, left=left, color=color, height=0.7, label=label or "_")
      left += value / scale
    axis.text(left, at, f" {left:.3g}", va="center", fontsize=7)
  axis.set_xlim(0, max(totals.values()) / scale * 1.25 or 1)
  axis.locator_params(axis="x", nbins=4)
  axis.set_title(title.format(prefix), fontsize=9)
  axis.tick_params(labelsize=7)
  axis.spines[["top", "right"]].set_visible(False)
  handles, labels = axis.get_legend_handles_labels()
  occurring = {label for each in parts.values() for label, value in each if value}
  shown = {label: handle for handle, label in zip(handles, labels, strict=True) if label in occurring}
  if len(shown) > 1:
    axis.legend(
        shown.values(), shown.keys(), fontsize=6, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2, frameon=False
    )


def _prefix(largest: float) -> tuple[str, float]:
  power = min(max((len(f"{largest:.0f}") - 1) // 3, 0), 6)
  return ("", "k", "M", "G", "T", "P", "E")[power], 1000.0**power

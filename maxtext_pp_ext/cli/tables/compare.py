# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The tables of `maxtext-pp compare`: what the compiled steps are, and what was measured."""

from __future__ import annotations

from collections.abc import Iterable
import sys
from typing import Any

from maxtext_pp_ext import units

_KINDS = ("all-gather", "reduce-scatter", "all-reduce", "collective-permute", "all-to-all", "ragged-all-to-all")


def show(found: dict[str, Any], failures: dict[str, str]) -> None:
  """Prints the tables.

  Args:
    found: what `--json` prints.
    failures: implementation -> why its step was not run.
  """
  from rich import console, text  # pylint: disable=import-outside-toplevel

  screen = console.Console(width=None if sys.stdout.isatty() else 160, highlight=False)
  versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
  screen.print(text.Text(f"{found['devices']}, per device and step ({versions})"))
  for name, text_ in found.get("flags", {}).items():
    screen.print(text.Text(f"with {name}: {text_}"))
  computed = {name: row for name, row in found["implementations"].items() if "failure" not in row}
  if computed:
    screen.print(_table(computed, _lines(list(computed.values()))))
  if any("projection" in row for row in computed.values()):
    screen.print(text.Text("* from the compiler's own estimates; nothing was measured (docs/seconds.md)"))
  for name, row in computed.items():
    if unknown := row.get("projection", {}).get("unknown"):
      screen.print(text.Text(f"{name}: the projection could not follow {', '.join(unknown)}"))
  for name, row in found["implementations"].items():
    if "failure" in row:
      word = "refused" if row.get("refused") else "not computed"
      screen.print(text.Text(f"{name}: {word}: {row['failure']}"))
  ran = {name: row for name, row in found["implementations"].items() if "seconds" in row.get("run", {})}
  if ran:
    screen.print(text.Text(f"\nmeasured on {found['devices']}, {found['run']['rounds']} rounds"))
    screen.print(_table(ran, _measured(list(ran.values()), found["run"]["base"])))
    for note in _measured_notes(ran, found):
      screen.print(text.Text(note))
  for name, failure in failures.items():
    screen.print(text.Text(f"{name}: not run: {failure}"))


def _table(names: Iterable[str], lines: Iterable[tuple[str, list[str] | None]]):
  """A table with a column for each name; cells None stand for a rule."""
  from rich import box, table, text  # pylint: disable=import-outside-toplevel

  shown = table.Table(box=box.HORIZONTALS)
  shown.add_column("")
  for name in names:
    shown.add_column(text.Text(name), justify="right")
  for label, cells in lines:
    if cells is None:
      shown.add_section()
    else:
      shown.add_row(text.Text(label), *map(text.Text, cells))
  return shown


def _lines(rows: list[dict[str, Any]]):
  """Yields (label, a cell for each row); cells None stand for a rule."""
  from maxtext_pp_ext.compiled import carried, compare  # pylint: disable=import-outside-toplevel

  size = lambda value: "–" if value is None else units.bytes_text(value)
  for key, label in (("peak", "memory: peak"), ("temp", "temp"), ("arguments", "arguments")):
    yield label, [size(row["bytes"][key]) for row in rows]
  yield "", None
  yield "sent in all", [size(compare.wire_bytes(row)) for row in rows]
  kinds = [*_KINDS, *sorted({each["kind"] for row in rows for each in row["transfers"]} - set(_KINDS))]
  yield from _chosen(rows, "kind", kinds, "")
  balanced = [sum(each.get("balanced_bytes", 0) for each in row["transfers"]) for row in rows]
  if any(balanced):
    yield "ragged-all-to-all, if routing is balanced", [size(each) if each else "–" for each in balanced]
  yield "", None
  yield from _chosen(rows, "carries", (*carried.CARRIED, compare.UNTOLD), "carries ")
  yield "", None
  depths = sorted({each["loop_depth"] for row in rows for each in row["transfers"]})
  labels = {depth: f"in {depth} loop{'s' * (depth != 1)}" for depth in depths}
  yield from _chosen(rows, "loop_depth", depths, "", labels)
  yield "", None
  share = lambda value: "–" if value is None else f"{value:.0%}"
  yield "overlap", [share(row["overlap"]["compute_meanwhile"]) for row in rows]
  yield "dot FLOPs", [f"{row['dot_flops']:.4g}" for row in rows]
  if any("projection" in row for row in rows):
    yield "", None
    yield from _projected([row.get("projection") for row in rows])
    yield "", None
  yield "compile seconds (of all processors)", [f"{row['compile_s']} ({row['compile_cpu_s']})" for row in rows]
  if any(row["loops_without_trip_count"] for row in rows):
    yield "loops counted once, trips unknown", [str(len(row["loops_without_trip_count"])) for row in rows]
  if any(row["conditionals_unknown"] for row in rows):
    yield "conditionals counted by their heaviest branch", [str(len(row["conditionals_unknown"])) for row in rows]


def _projected(found: list[dict[str, Any] | None]):
  """The projected step, what its time goes to, and what it comes to."""
  from maxtext_pp_ext.compiled.projection import costs  # pylint: disable=import-outside-toplevel

  cells = lambda text: ["–" if each is None else text(each) for each in found]
  seconds = lambda value: f"{value:.3g}" if value else "–"
  yield "step, projected seconds*", cells(lambda each: f"{each['step_s']:.4g}")
  for part in costs.COMPUTED:
    yield f"  {part}", cells(lambda each, part=part: seconds(each["parts"].get(part, 0)))
  sums = [{} if each is None else each["parts"] for each in found]
  waits = dict.fromkeys(part for parts in sums for part in parts if part not in costs.COMPUTED)
  for part in sorted(waits, key=lambda part: -max(parts.get(part, 0.0) for parts in sums)):
    if any(each and each["parts"].get(part, 0) >= 0.001 * each["step_s"] for each in found):
      yield f"  {part}", cells(lambda each, part=part: seconds(each["parts"].get(part, 0)))
  yield "of the compute, bubbles", cells(lambda each: seconds(each["bubbles_s"]))
  yield "of the compute, again", cells(lambda each: seconds(each["again_s"]))
  yield "tokens per second and device", cells(lambda each: f"{each['tokens_per_s']:.0f}")
  yield "TFLOP/s per device, MFU", cells(lambda each: f"{each['tflops_per_s']:.0f}, {each['mfu']:.1%}")


def _measured(rows: list[dict[str, Any]], base: str):
  """Yields the same of the steps that were run."""
  size = lambda value: "–" if value is None else units.bytes_text(value)
  quartiles = "{median:.4g} ({lower_quartile:.4g}–{upper_quartile:.4g})"
  ratio = "{median:.3f}× ({lower_quartile:.3f}–{upper_quartile:.3f})"
  yield "seconds of a step (middle half)", [quartiles.format(**row["run"]["step_s"]) for row in rows]
  yield f"ratio to {base} (middle half)", [ratio.format(**row["run"]["ratio"]) for row in rows]
  if any("of_projection" in row["run"] for row in rows):
    projected = [row.get("projection") for row in rows]
    yield "projected seconds*", ["–" if each is None else f"{each['step_s']:.4g}" for each in projected]
    found = [row["run"].get("of_projection") for row in rows]
    yield "measured / projected", ["–" if each is None else f"{each:.3f}×" for each in found]
  yield "memory in use, peak", [size((row["run"]["memory"] or {}).get("peak")) for row in rows]
  yield "the compiler's peak", [size(row.get("bytes", {}).get("peak")) for row in rows]


def _measured_notes(ran: dict[str, dict[str, Any]], found: dict[str, Any]):
  """Yields what to know about the figures."""
  order = ", ".join(f"{name} {count}" for name, count in found["run"]["turns"])
  yield f"Turns, each in a process of its own, and their rounds: {order}"
  if "machine" not in found:
    yield "Virtual devices' transfers are copies in memory: times say which step computes or copies more than another."
  without = [name for name, row in ran.items() if row["run"]["memory"] is None]
  if without:
    yield f"{', '.join(without)}: these devices do not report their memory in use"
  for name, row in ran.items():
    memory = row["run"]["memory"]
    if memory and memory["peak"] == memory["peak_before_steps"]:
      yield f"{name}: the peak is that of the state's initialisation; the steps took no more"


def _chosen(rows: list[dict[str, Any]], key: str, values: Any, prefix: str, labels: Any = None):
  """Yields bytes and counts of the transfers, for each value that occurs."""
  from maxtext_pp_ext.compiled import compare  # pylint: disable=import-outside-toplevel

  for value in values:
    counts = [sum(each["count"] for each in row["transfers"] if each[key] == value) for row in rows]
    if any(counts):
      cells = [
          f"{units.bytes_text(compare.wire_bytes(row, **{key: value}))} ×{count}" if count else "–"
          for row, count in zip(rows, counts, strict=True)
      ]
      yield f"{prefix}{(labels or {}).get(value, value)}", cells

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The tables of `maxtext-pp compare`: what the compiled steps are, and what was measured."""

from collections.abc import Callable, Iterable, Iterator
import sys
from typing import Any

from maxtext_pp_ext import units


def show(found: dict[str, Any]) -> None:
  """Prints the tables of what `--json` prints."""
  from rich import console, text  # pylint: disable=import-outside-toplevel

  screen = console.Console(width=None if sys.stdout.isatty() else 160, highlight=False)
  for part in _parts(found):
    screen.print(text.Text(part) if isinstance(part, str) else part)


def _parts(found: dict[str, Any]) -> Iterator[Any]:
  """Yields lines of text, and tables of rich."""
  rows = found["implementations"]
  yield f"{found['devices']}, per device and step ({', '.join(map(' '.join, found['versions'].items()))})"
  yield from (f"with {name}: {flags}" for name, flags in found.get("flags", {}).items())
  if computed := {name: row for name, row in rows.items() if "failure" not in row}:
    yield _table(computed, _lines(list(computed.values())))
  if any("projection" in row for row in computed.values()):
    yield "* from the compiler's own estimates; nothing was measured (docs/seconds.md)"
  for name, row in computed.items():
    if unknown := row.get("projection", {}).get("unknown"):
      yield f"{name}: the projection could not follow {', '.join(unknown)}"
  yield from (_best_flags(name, row) for name, row in rows.items() if "tried" in row)
  for name, row in rows.items():
    if "failure" in row:
      yield f"{name}: {'refused' if row.get('refused') else 'not computed'}: {row['failure']}"
  if ran := {name: row for name, row in rows.items() if "seconds" in row.get("run", {})}:
    yield f"\nmeasured on {found['devices']}, {found['run']['rounds']} rounds"
    yield _table(ran, _measured(list(ran.values()), found["run"]["base"]))
    yield from _measured_notes(ran, found)
  yield from (f"{name}: not run: {failure}" for name, failure in not_run(rows).items())


def _best_flags(name: str, row: dict[str, Any]) -> str:
  """What `--flags best` found: the sets, the seconds with them and without any, and the sets that were refused."""
  default, *with_sets = row["tried"]
  (best,) = (each for each in row["tried"] if each["flags"] == row["flags"])
  sets = f"fastest with {', '.join(row['flags'])}" if row["flags"] else "no set of flags makes it faster"
  if best["without"]:
    sets += f", without {', '.join(best['without'])}, which the compiler lacks"
  seconds = f"{default['step_s']:.4g} s" if "step_s" in default else "not compiled"
  text = f"{name}: {sets}; default flags {seconds}; {units.counted(len(with_sets), 'combination')} tried"
  refused = [", ".join(each["flags"]) for each in with_sets if "failure" in each]
  return text + (f", not compiled: {'; '.join(refused)}" if refused else "")


def not_run(rows: dict[str, dict[str, Any]]) -> dict[str, str]:
  """Implementation -> why its step was not run."""
  return {name: row["run"]["failure"] for name, row in rows.items() if "failure" in row.get("run", {})}


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


def _cells(values: Iterable[Any], text: Callable[[Any], str]) -> list[str]:
  """Each value as text, and a dash for None."""
  return ["–" if value is None else text(value) for value in values]


def _bytes(values: Iterable[float | None]) -> list[str]:
  return _cells(values, units.bytes_text)


def _seconds(values: Iterable[float | None]) -> list[str]:
  return _cells((value or None for value in values), "{:.3g}".format)


def _lines(rows: list[dict[str, Any]]):
  """Yields (label, a cell for each row); cells None stand for a rule."""
  from maxtext_pp_ext.compiled import compare, reading  # pylint: disable=import-outside-toplevel
  from maxtext_pp_ext.compiled.program.collectives import COLLECTIVES  # pylint: disable=import-outside-toplevel

  for key, label in (("peak", "memory: peak"), ("temp", "temp"), ("arguments", "arguments")):
    yield label, _bytes(row["bytes"][key] for row in rows)
  yield "", None
  yield "sent in all", _bytes(map(compare.wire_bytes, rows))
  others = sorted({each["kind"] for row in rows for each in row["transfers"]}.difference(COLLECTIVES))
  yield from _chosen(rows, "kind", {kind: kind for kind in (*COLLECTIVES, *others)})
  balanced = [sum(each.get("balanced_bytes", 0) for each in row["transfers"]) for row in rows]
  if any(balanced):
    yield "ragged-all-to-all, if routing is balanced", _bytes(each or None for each in balanced)
  yield "", None
  yield from _chosen(rows, "payload", {what: f"payload: {what}" for what in (*reading.PAYLOADS, compare.UNTOLD)})
  yield "", None
  depths = sorted({each["loop_depth"] for row in rows for each in row["transfers"]})
  yield from _chosen(rows, "loop_depth", {depth: f"in {units.counted(depth, 'loop')}" for depth in depths})
  yield "", None
  yield "overlap", _cells((row["overlap"]["compute_meanwhile"] for row in rows), "{:.0%}".format)
  yield "dot FLOPs", [f"{row['dot_flops']:.4g}" for row in rows]
  if any("projection" in row for row in rows):
    yield "", None
    yield from _projected([row.get("projection") for row in rows])
    yield "", None
  yield "compile seconds (of all processors)", [f"{row['compile_s']} ({row['compile_cpu_s']})" for row in rows]
  unknown = {
      "loops_without_trip_count": "loops counted once, trips unknown",
      "conditionals_unknown": "conditionals counted by their heaviest branch",
  }
  for key, label in unknown.items():
    if any(row[key] for row in rows):
      yield label, [str(len(row[key])) for row in rows]


def _projected(found: list[dict[str, Any] | None]):
  """The projected step, what its time goes to, and what it comes to."""
  from maxtext_pp_ext.compiled.projection import costs  # pylint: disable=import-outside-toplevel

  yield "step, projected seconds*", _cells(found, "{0[step_s]:.4g}".format)
  if any(each and "at_nominal_rate_s" in each for each in found):
    at_nominal = (None if each is None else each.get("at_nominal_rate_s") for each in found)
    yield "  at the network's nominal rate", _seconds(at_nominal)
  sums = [{} if each is None else each["parts"] for each in found]
  waits = dict.fromkeys(part for parts in sums for part in parts if part not in costs.COMPUTED)
  shown = [part for part in waits if any(each and each["parts"].get(part, 0) >= 0.001 * each["step_s"] for each in found)]
  longest = {part: max(parts.get(part, 0.0) for parts in sums) for part in shown}
  for part in (*costs.COMPUTED, *sorted(shown, key=longest.__getitem__, reverse=True)):
    yield f"  {part}", _seconds(parts.get(part) for parts in sums)
  for what in ("bubbles", "rematerialisation"):
    yield f"of the compute, {what}", _seconds(None if each is None else each[f"{what}_s"] for each in found)
  yield "tokens per second and device", _cells(found, "{0[tokens_per_s]:.0f}".format)
  yield "TFLOP/s per device, MFU", _cells(found, "{0[tflops_per_s]:.0f}, {0[mfu]:.1%}".format)


def _measured(rows: list[dict[str, Any]], base: str):
  """Yields the same of the steps that were run."""
  ran = [row["run"] for row in rows]
  quartiles = "{median:.4g} ({lower_quartile:.4g}–{upper_quartile:.4g})"
  ratio = "{median:.3f}× ({lower_quartile:.3f}–{upper_quartile:.3f})"
  yield "seconds of a step (middle half)", [quartiles.format(**each["step_s"]) for each in ran]
  yield f"ratio to {base} (middle half)", [ratio.format(**each["ratio"]) for each in ran]
  if any("of_projection" in each for each in ran):
    yield "projected seconds*", _cells((row.get("projection") for row in rows), "{0[step_s]:.4g}".format)
    yield "measured / projected", _cells((each.get("of_projection") for each in ran), "{:.3f}×".format)
  yield "memory in use, peak", _bytes((each["memory"] or {}).get("peak") for each in ran)
  yield "the compiler's peak", _bytes(row.get("bytes", {}).get("peak") for row in rows)


def _measured_notes(ran: dict[str, dict[str, Any]], found: dict[str, Any]) -> Iterator[str]:
  """Yields what to know about the figures."""
  order = ", ".join(f"{name} {count}" for name, count in found["run"]["turns"])
  yield f"Turns, each in a process of its own, and their rounds: {order}"
  if "machine" not in found:
    yield "Virtual devices' transfers are copies in memory: times say which step computes or copies more than another."
  memories = {name: row["run"]["memory"] for name, row in ran.items()}
  if without := [name for name, memory in memories.items() if memory is None]:
    yield f"{', '.join(without)}: these devices do not report their memory in use"
  for name, memory in memories.items():
    if memory and memory["peak"] == memory["peak_before_steps"]:
      yield f"{name}: the peak is that of the state's initialisation; the steps took no more"


def _chosen(rows: list[dict[str, Any]], key: str, labels: dict[Any, str]):
  """Yields bytes and counts of the transfers that have a value at `key`, for each value that occurs."""
  from maxtext_pp_ext.compiled import compare  # pylint: disable=import-outside-toplevel

  for value, label in labels.items():
    counts = [sum(each["count"] for each in row["transfers"] if each[key] == value) for row in rows]
    if any(counts):
      sent = _bytes(compare.wire_bytes(row, **{key: value}) for row in rows)
      yield label, [f"{size} ×{count}" if count else "–" for size, count in zip(sent, counts, strict=True)]

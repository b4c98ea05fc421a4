# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Projected step times beside those that others have measured and published, for MaxText without a pipeline.

  python -m benchmarks.published                                  every run that has no result yet
  python -m benchmarks.published --run deepseek2-16b-v5p-8        one of them, again
  python -m benchmarks.published --impl none                      only as it was measured, not with the window
  python -m benchmarks.published --impl circular --run …          a window that holds no gathered weights
  python -m benchmarks.published --run llama2-70b-v5p-512 --flags DENSE_VMEM_LIMIT_FLAG    with sets beside its own

Compiles the runs of `published.yml` with their keys and compiler flags for their topology, as they were measured (none)
and with our window (docs/window.md), and projects a step. Needs the extra `tools` (libtpu); a compilation takes one to
ten minutes of a processor. Results are kept in `results/published.{json,md}` after each, so a command that was ended goes
on where it was.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
import pathlib
import statistics
import sys
from typing import Any

from rich import console as rich_console
import yaml

from benchmarks import compile_step, shapes, tables
from maxtext_pp_ext.compiled import flags
from maxtext_pp_ext.host.models import variants
from maxtext_pp_ext.processes import interruption

RUNS = pathlib.Path(__file__).resolve().with_suffix(".yml")
# Figures by run and row: an implementation, or with sets of flags `shapes.row_name`.
Results = dict[str, dict[str, dict[str, Any]]]
IMPLEMENTATIONS = (variants.NONE, variants.WINDOW)
# Without a pipeline it is a window, too, which gathers each weight where a layer uses it.
_IN_LAYER = "circular"
_WINDOWS = (variants.WINDOW, _IN_LAYER)
_WITHOUT_STORAGE = {"dataset_type": "synthetic", "enable_checkpointing": False}
_FSDP_BY_DEFAULT = {"ici_fsdp_parallelism": -1}  # MaxText's, for runs that do not set it
_HEADER = ("run", "remat policy", "devices", "measured s", "projected s", "error")
_PARTS = ("products", "kernels", "other", "waiting", "MFU", "peak GB")
_OF_WINDOW = ("none, best s", "window, best s", "window ÷ none", "window peak GB")
_INTRODUCTION = """# Published runs

`python -m benchmarks.published` printed this: MaxText runs without a pipeline whose step time is published, and what a \
step is projected to take (docs/seconds.md) with the same keys and flags, MaxText 0.2.5 and today's compiler. Measured \
with older versions of both; the same configuration published twice with other versions differs by 1 to 6 %. \
Sources, keys and flags are in `../published.yml`. Seconds of a step, those with * from published TFLOP/s; products, \
kernels, other compute and waiting for transfers add up to the projection.

Nobody has measured the last four columns: the same run with the window (docs/window.md), also projected. Both runs \
have the fastest flags that were tried: the run's own, or its own and sets of MaxText's (`--flags`). All are listed \
below the table. Where † follows, the fastest window holds no gathered weights: `pipeline_impl=circular` \
(`--impl circular`).
"""


def runs() -> dict[str, dict[str, Any]]:
  """The published runs by name."""
  return yaml.safe_load(RUNS.read_text(encoding="utf-8"))


def arguments(run: dict[str, Any], impl: str, sets: Sequence[str] = (), without: Sequence[str] = ()) -> list[str]:
  """MaxText's command-line arguments of a run, as it was measured or in a window; `sets` are added to its flags.

  Raises ValueError if a flag would have two values.
  """
  keys = {
      **_WITHOUT_STORAGE,
      **run["keys"],
      "compile_topology": run["topology"],
      "compile_topology_num_slices": run["slices"],
  }
  if given := flags.joined(" ".join(run["xla_flags"]), sets, without):
    keys[flags.KEY] = given
  if impl in _WINDOWS:
    keys |= variants.keys(variants.WINDOW, _FSDP_BY_DEFAULT | keys)
  if impl == _IN_LAYER:
    keys["pipeline_impl"] = impl
  return [f"{key}={value}" for key, value in keys.items()]


def read(file: pathlib.Path) -> Results:
  """The figures of earlier runs, by run and implementation. Files without implementations have those of none."""
  return {name: {variants.NONE: row} if "arguments" in row else row for name, row in tables.read(file).items()}


def main(argv: list[str] | None = None) -> None:
  options = _parse(argv)
  console, known = rich_console.Console(), runs()
  json_file = options.output.with_suffix(".json")
  results = read(json_file)
  for name in options.run or known:
    for impl in options.impl:
      row = shapes.row_name(impl, keeps=False, sets=options.flags, without=options.without)
      if not options.run and row in results.get(name, {}):
        continue
      given = arguments(known[name], impl, options.flags, options.without)
      figures = compile_step.compile_step(
          given,
          label=f"{name}, {row}",
          names=[name, row],
          options=options,
          console=console,
      )
      results.setdefault(name, {})[row] = {**figures, "arguments": given, "versions": compile_step.versions()}
      tables.write(json_file, results)
      options.output.with_suffix(".md").write_text(report(results), encoding="utf-8")
  console.print(report(results), markup=False, highlight=False, soft_wrap=True)


def report(results: Results) -> str:
  """The Markdown file: a table, the errors' median, the window's ratios, and what differs from the runs measured."""
  known, projected = runs(), projections(results, variants.NONE)
  computed = [name for name in known if name in projected]
  cells = [_row(name, known[name], results[name]) for name in computed]
  parts = [_INTRODUCTION, tables.markdown((*_HEADER, *_PARTS, *_OF_WINDOW), cells)]
  if computed:
    errors = [abs(error(known[name], projected[name])) for name in computed]
    within = {limit: sum(each <= limit for each in errors) for limit in (0.10, 0.25)}
    parts.append(
        f"\n{len(errors)} runs: {within[0.10]} within 10 %, {within[0.25]} within 25 %, median of the errors "
        f"{statistics.median(errors):.0%}."
    )
  parts += [f"\n{each}" for each in tables.scaled((name, results[name]["none"]) for name in computed)]
  if found := ratios(results):
    largest = max(found, key=lambda name: found[name])
    parts.append(
        f"\nWith the window, {len(found)} runs: a step takes {statistics.mean(found.values()):.3f} times the seconds of "
        f"none on average, and {found[largest]:.3f} times at most ({largest})."
        "\n\nSeconds with the flags that were tried:\n"
    )
    parts += [f"- {name}: {_seconds(results[name])}" for name in known if name in found]
  failed = [
      (name, row, figures) for name in known for row, figures in results.get(name, {}).items() if "failure" in figures
  ]
  refused = [each for each in failed if shapes.implementation_of(each[1]) == variants.WINDOW and each[2].get("refused")]
  others = [each for each in failed if each not in refused]
  for title, listed in (("The window is refused for", refused), ("Not computed", others)):
    lines = [f"- {name}, {row}: {figures['failure']}" for name, row, figures in listed]
    parts += [f"\n{title}:\n", *lines] if listed else []
  parts.append("\n## What differs\n")
  for name in computed:
    refused_flags = [f"flag refused: `{flag}`" for flag in known[name]["refused_flags"]]
    parts.append(f"- {name} ({known[name]['versions']}): {'; '.join([*known[name]['differences'], *refused_flags])}")
  return "\n".join(parts) + "\n"


def projections(results: Results, row: str) -> dict[str, dict[str, Any]]:
  """The projections of a row, by run, without the runs that have none."""
  rows = {name: each.get(row, {}) for name, each in results.items()}
  return {name: figures["projection"] for name, figures in rows.items() if "projection" in figures}


def fastest(rows: dict[str, dict[str, Any]], *impls: str) -> dict[str, Any] | None:
  """The figures of the implementation and the flags with which a step is fastest; None if none were compiled."""
  own = [row for name, row in rows.items() if shapes.implementation_of(name) in impls and "projection" in row]
  return min(own, key=_step, default=None)


def ratios(results: Results) -> dict[str, float]:
  """The projected seconds with the window in parts of those without it, best to best, for the runs that have both."""
  best = {name: (fastest(rows, variants.NONE), fastest(rows, *_WINDOWS)) for name, rows in results.items()}
  return {name: _step(window) / _step(none) for name, (none, window) in best.items() if none and window}


def _step(row: dict[str, Any]) -> float:
  return row["projection"]["step_s"]


def _seconds(rows: dict[str, dict[str, Any]]) -> str:
  """A run's rows in words."""
  computed = {name: row for name, row in sorted(rows.items()) if "projection" in row}
  return "; ".join(f"{name} {tables.number(_step(row), 3)} s" for name, row in computed.items())


def error(run: dict[str, Any], projection: dict[str, Any]) -> float:
  """Of a projection, relative to what was measured."""
  return projection["step_s"] / run["step_seconds"] - 1


def _row(name: str, run: dict[str, Any], rows: dict[str, dict[str, Any]]) -> tuple[str, ...]:
  none = rows[variants.NONE]
  projection, parts = none["projection"], none["projection"]["parts"]
  compute = [parts.get(part, 0.0) for part in ("products", "kernels", "other compute")]
  derived = "" if run["step_seconds_is"] == "published" else " *"
  of_window = [tables.MISSING] * len(_OF_WINDOW)
  if window := fastest(rows, *_WINDOWS):
    best, ours = _step(fastest(rows, variants.NONE) or none), _step(window)
    mark = " †" if window is fastest(rows, _IN_LAYER) else ""
    peak = tables.number(window["peak_GB"])
    of_window = [tables.number(best, 2), tables.number(ours, 2) + mark, f"{ours / best:.3f}", peak]
  return (
      name,
      run["keys"].get("remat_policy", "full"),
      str(run["devices"]),
      tables.number(run["step_seconds"], 2) + derived,
      tables.number(projection["step_s"], 2),
      f"{error(run, projection):+.0%}",
      *(tables.number(value, 2) for value in (*compute, projection["step_s"] - sum(compute))),
      f"{projection['mfu']:.0%}",
      tables.number(none["peak_GB"]),
      *of_window,
  )


def _parse(argv: list[str] | None) -> argparse.Namespace:
  parser = argparse.ArgumentParser(prog="python -m benchmarks.published", description=__doc__.splitlines()[0])
  parser.add_argument("--run", nargs="+", choices=list(runs()), metavar="NAME", help="these, also if they have a result")
  sets = "MaxText's sets of XLA flags, beside the run's"
  options = compile_step.parse(parser, argv, output="published", impl=[*IMPLEMENTATIONS], minutes=60.0, sets=sets)
  known = (variants.NONE, *_WINDOWS)
  if others := [impl for impl in options.impl if impl not in known]:
    parser.error(f"--impl {' '.join(others)}: these runs have no pipeline. Choose from {', '.join(known)}.")
  return options


if __name__ == "__main__":
  sys.exit(interruption.run(main, "published"))

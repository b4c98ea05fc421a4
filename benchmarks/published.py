# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Projected step times beside those that others have measured and published, for MaxText without a pipeline.

  python -m benchmarks.published                                  every run that has no result yet
  python -m benchmarks.published --run deepseek2-16b-v5p-8        one of them, again
  python -m benchmarks.published --impl none                      only as it was measured, not with the window

Compiles the runs of `published.yml` with their keys and compiler flags for their topology, as they were measured (none)
and with our window (docs/window.md), and projects a step. Needs the extra `tools` (libtpu); a compilation takes one to
ten minutes of a processor. Results are kept in `results/published.{json,md}` after each, so a command that was ended goes
on where it was.
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import sys
from typing import Any

from rich import console as rich_console
import yaml

from benchmarks import compile_step, tables
from maxtext_pp_ext.host.models import variants
from maxtext_pp_ext.processes import interruption

RUNS = pathlib.Path(__file__).resolve().with_suffix(".yml")
Results = dict[str, dict[str, dict[str, Any]]]  # figures by run and implementation
IMPLEMENTATIONS = (variants.NONE, variants.WINDOW)
_WITHOUT_STORAGE = {"dataset_type": "synthetic", "enable_checkpointing": False}
_FSDP_BY_DEFAULT = {"ici_fsdp_parallelism": -1}  # MaxText's, for runs that do not set it
_HEADER = ("run", "remat policy", "devices", "measured s", "projected s", "error")
_PARTS = ("products", "kernels", "other", "waiting", "MFU", "peak GB")
_OF_WINDOW = ("window s", "window ÷ none", "window peak GB")
_INTRODUCTION = """# Published runs

`python -m benchmarks.published` printed this: MaxText runs without a pipeline whose step time is published, and what a \
step is projected to take (docs/seconds.md) with the same keys and flags, MaxText 0.2.5 and today's compiler. Measured \
with older versions of both; the same configuration published twice with other versions differs by 1 to 6 %. \
Sources, keys and flags are in `../published.yml`. Seconds of a step, those with * from published TFLOP/s; products, \
kernels, other compute and waiting for transfers add up to the projection.

Nobody has measured the last three columns: the same run with the window (docs/window.md), also projected.
"""


def runs() -> dict[str, dict[str, Any]]:
  """The published runs by name."""
  return yaml.safe_load(RUNS.read_text(encoding="utf-8"))


def arguments(run: dict[str, Any], impl: str) -> list[str]:
  """MaxText's command-line arguments of a run with one of `IMPLEMENTATIONS`."""
  keys = {
      **_WITHOUT_STORAGE,
      **run["keys"],
      "compile_topology": run["topology"],
      "compile_topology_num_slices": run["slices"],
  }
  if run["xla_flags"]:
    keys["compile_xla_flags"] = " ".join(run["xla_flags"])
  if impl == variants.WINDOW:
    keys |= variants.keys(impl, _FSDP_BY_DEFAULT | keys)
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
      if not options.run and impl in results.get(name, {}):
        continue
      given = arguments(known[name], impl)
      figures = compile_step.compile_step(
          given,
          label=f"{name}, {impl}",
          bounds=options.limits,
          console=console,
          hlo_file=options.hlo / f"{name}-{impl}.hlo" if options.hlo else None,
      )
      results.setdefault(name, {})[impl] = {**figures, "arguments": given, "versions": compile_step.versions()}
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
  if found := ratios(results):
    largest = max(found, key=lambda name: found[name])
    parts.append(
        f"\nWith the window, {len(found)} runs: a step takes {statistics.mean(found.values()):.2f} times the seconds of "
        f"none on average, and {found[largest]:.2f} times at most ({largest})."
    )
  failed = [(name, impl, row) for name in known for impl, row in results.get(name, {}).items() if "failure" in row]
  refused = [each for each in failed if each[1] == variants.WINDOW and each[2].get("refused")]
  others = [each for each in failed if each not in refused]
  for title, listed in (("The window is refused for", refused), ("Not computed", others)):
    parts += [f"\n{title}:\n", *(f"- {name}, {impl}: {row['failure']}" for name, impl, row in listed)] if listed else []
  parts.append("\n## What differs\n")
  for name in computed:
    flags = [f"flag refused: `{flag}`" for flag in known[name]["refused_flags"]]
    parts.append(f"- {name} ({known[name]['versions']}): {'; '.join([*known[name]['differences'], *flags])}")
  return "\n".join(parts) + "\n"


def projections(results: Results, impl: str) -> dict[str, dict[str, Any]]:
  """The projections of an implementation, by run, without the runs that have none."""
  rows = {name: each.get(impl, {}) for name, each in results.items()}
  return {name: row["projection"] for name, row in rows.items() if "projection" in row}


def ratios(results: Results) -> dict[str, float]:
  """The projected seconds with the window in parts of those without it, for the runs that have both."""
  none, window = (projections(results, impl) for impl in IMPLEMENTATIONS)
  return {name: window[name]["step_s"] / none[name]["step_s"] for name in none if name in window}


def error(run: dict[str, Any], projection: dict[str, Any]) -> float:
  """Of a projection, relative to what was measured."""
  return projection["step_s"] / run["step_seconds"] - 1


def _row(name: str, run: dict[str, Any], rows: dict[str, dict[str, Any]]) -> tuple[str, ...]:
  none, window = rows[variants.NONE], rows.get(variants.WINDOW, {})
  projection, parts = none["projection"], none["projection"]["parts"]
  compute = [parts.get(part, 0.0) for part in ("products", "kernels", "other compute")]
  derived = "" if run["step_seconds_is"] == "published" else " *"
  of_window = [tables.MISSING] * len(_OF_WINDOW)
  if "projection" in window:
    seconds = window["projection"]["step_s"]
    figures = (seconds, seconds / projection["step_s"])
    of_window = [*(tables.number(value, 2) for value in figures), tables.number(window["peak_GB"])]
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
  options = compile_step.parse(parser, argv, output="published", impl=[*IMPLEMENTATIONS], minutes=60.0)
  if others := [impl for impl in options.impl if impl not in IMPLEMENTATIONS]:
    parser.error(f"--impl {' '.join(others)}: these runs have no pipeline. Choose from {', '.join(IMPLEMENTATIONS)}.")
  return options


if __name__ == "__main__":
  sys.exit(interruption.run(main, "published"))

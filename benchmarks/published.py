# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Projected step times beside those that others have measured and published, for MaxText without a pipeline.

  python -m benchmarks.published                                  every run that has no result yet
  python -m benchmarks.published --run deepseek2-16b-v5p-8        one of them, again

Compiles the runs of `published.yml` with their keys and compiler flags for their topology, and projects a step. Needs the
extra `tools` (libtpu); a run takes one to ten minutes of a processor. Results are kept in
`results/published.{json,md}` after each run, so a command that was ended goes on where it was.
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
from maxtext_pp_ext.processes import interruption

RUNS = pathlib.Path(__file__).resolve().with_suffix(".yml")
_WITHOUT_STORAGE = {"dataset_type": "synthetic", "enable_checkpointing": False}
_HEADER = ("run", "chips", "measured s", "projected s", "error", "products", "kernels", "other", "waiting", "MFU")
_INTRODUCTION = """# Published runs

`python -m benchmarks.published` printed this: MaxText runs without a pipeline whose step time is published, and what a \
step is projected to take (docs/seconds.md) with the same keys and flags, MaxText 0.2.5 and today's compiler. Measured \
with older versions of both; the same configuration published twice with other versions differs by 1 to 6 %. \
Sources, keys and flags are in `../published.yml`. Seconds of a step, those with * from published TFLOP/s; products, \
kernels, other compute and waiting for transfers add up to the projection.
"""


def runs() -> dict[str, dict[str, Any]]:
  """The published runs by name."""
  return yaml.safe_load(RUNS.read_text(encoding="utf-8"))


def arguments(run: dict[str, Any]) -> list[str]:
  """MaxText's command-line arguments."""
  keys = {
      **_WITHOUT_STORAGE,
      **run["keys"],
      "compile_topology": run["topology"],
      "compile_topology_num_slices": run["slices"],
  }
  if run["xla_flags"]:
    keys["compile_xla_flags"] = " ".join(run["xla_flags"])
  return [f"{key}={value}" for key, value in keys.items()]


def main(argv: list[str] | None = None) -> None:
  options = _parse(argv)
  console, known = rich_console.Console(), runs()
  json_file = options.output.with_suffix(".json")
  results = tables.read(json_file)
  for name in options.run or [name for name in known if name not in results]:
    given = arguments(known[name])
    figures = compile_step.compile_step(
        given,
        label=name,
        bounds=options.limits,
        console=console,
        hlo_file=options.hlo / f"{name}.hlo" if options.hlo else None,
    )
    results[name] = {**figures, "arguments": given, "versions": compile_step.versions()}
    tables.write(json_file, results)
    options.output.with_suffix(".md").write_text(report(results), encoding="utf-8")
  console.print(report(results), markup=False, highlight=False, soft_wrap=True)


def report(results: dict[str, dict[str, Any]]) -> str:
  """The Markdown file: a table, the errors' median, and what differs from the runs that were measured."""
  known = runs()
  computed = {name: results[name] for name in known if "projection" in results.get(name, {})}
  rows = [_row(name, known[name], row["projection"]) for name, row in computed.items()]
  parts = [_INTRODUCTION, tables.markdown(_HEADER, rows)]
  if computed:
    errors = [abs(error(known[name], row["projection"])) for name, row in computed.items()]
    within = {limit: sum(each <= limit for each in errors) for limit in (0.10, 0.25)}
    parts.append(
        f"\n{len(errors)} runs: {within[0.10]} within 10 %, {within[0.25]} within 25 %, median of the errors "
        f"{statistics.median(errors):.0%}."
    )
  failures = [f"- {name}: {results[name]['failure']}" for name in known if "failure" in results.get(name, {})]
  parts += ["\nNot computed:\n", *failures] if failures else []
  parts.append("\n## What differs\n")
  for name in computed:
    refused = [f"flag refused: `{flag}`" for flag in known[name]["refused_flags"]]
    parts.append(f"- {name} ({known[name]['versions']}): {'; '.join([*known[name]['differences'], *refused])}")
  return "\n".join(parts) + "\n"


def error(run: dict[str, Any], projection: dict[str, Any]) -> float:
  """Of a projection, relative to what was measured."""
  return projection["step_s"] / run["step_seconds"] - 1


def _row(name: str, run: dict[str, Any], projection: dict[str, Any]) -> tuple[str, ...]:
  parts = projection["parts"]
  compute = [parts.get(part, 0.0) for part in ("products", "kernels", "other compute")]
  derived = "" if run["step_seconds_is"] == "published" else " *"
  return (
      name,
      str(run["devices"]),
      tables.number(run["step_seconds"], 2) + derived,
      tables.number(projection["step_s"], 2),
      f"{error(run, projection):+.0%}",
      *(tables.number(value, 2) for value in (*compute, projection["step_s"] - sum(compute))),
      f"{projection['mfu']:.0%}",
  )


def _parse(argv: list[str] | None) -> argparse.Namespace:
  parser = argparse.ArgumentParser(prog="python -m benchmarks.published", description=__doc__.splitlines()[0])
  parser.add_argument("--run", nargs="+", choices=list(runs()), metavar="NAME", help="these, also if they have a result")
  return compile_step.parse(parser, argv, output="published", impl=[], minutes=60.0)


if __name__ == "__main__":
  sys.exit(interruption.run(main, "published"))

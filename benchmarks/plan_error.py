# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Compares the closed forms of `maxtext-pp plan` with the TPU compiler's figures of the same steps.

  python -m benchmarks.plan_error

It compiles nothing. It predicts every row that compiler_figures and scaling have computed, and writes
`results/plan_error.md`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
import pathlib
from typing import Any, NamedTuple

from benchmarks import compile_step, scaling, shapes, tables

_HEADER = (
    "shape",
    "pipeline",
    "peak GB",
    "predicted",
    "error",
    "GB sent",
    "predicted",
    "error",
    "between slices",
    "predicted",
)
_INTRODUCTION = """# Closed forms against the compiler

`python -m benchmarks.plan_error` printed this: what `maxtext-pp plan` predicts (`maxtext_pp_ext/plan/costs.py`) for the \
rows of [compiler_figures.md](compiler_figures.md) and [scaling.md](scaling.md), per chip and step.

- Peak memory is the memory that a chip needs at once.
- If weights are gathered at each use (none, circular), the compiler turns some gathers into loops of permutes inside \
the matrix multiplication, and gathers again for each multiplication of backward. The closed forms do not include that.
- For Mixtral with dense dispatch, the closed forms do not include the bytes that the layers send to dispatch tokens. \
These are most of the traffic there, and grow with the bubbles.
"""


class Case(NamedTuple):
  """A step that was compiled.

  Attributes:
    title: the shape's title.
    impl: a key of `shapes.IMPLEMENTATIONS`.
    arguments: MaxText's command-line arguments.
    figures: the compiler's figures.
  """

  title: str
  impl: str
  arguments: list[str]
  figures: dict[str, Any]


def cases(results: pathlib.Path = compile_step.RESULTS) -> Iterator[Case]:
  """Every computed row of the pipelines that have closed forms, compiled without further flags."""
  rows = {name: (shapes.SHAPES[name], each) for name, each in tables.read(results / "compiler_figures.json").items()}
  points = tables.read(results / "scaling.json")
  for _, series in scaling.SERIES.values():
    for point in series:
      label = scaling.label(point)
      rows[label] = scaling.shape(point), points.get(label, {})
  for title, (shape, each) in rows.items():
    for impl, figures in each.items():
      if "failure" not in figures and impl in shapes.IMPLEMENTATIONS and not impl.startswith("host"):
        yield Case(title, impl, shapes.arguments(shape, impl), figures)


def predicted(case: Case) -> Any:
  """The `Costs` of a case by the closed forms."""
  import maxtext_pp_ext

  maxtext_pp_ext.install()
  from maxtext_pp_ext import presets
  from maxtext_pp_ext.host.models import abstract_model, run_config
  from maxtext_pp_ext.plan import of_run
  from maxtext_pp_ext.schedule import CircularSchedule

  arguments = case.arguments
  if "=" not in arguments[0]:
    arguments = [presets.path(arguments[0]), *arguments[1:]]
  config = run_config.read_without_run(arguments)
  schedule = CircularSchedule.of_config(config) if config.using_pipeline_parallelism else None
  return of_run.costs_of_run(config, shapes.IMPLEMENTATIONS[case.impl], schedule, *abstract_model.explained(config))


def report(rows: list[tuple[Case, Any]]) -> str:
  lines = []
  for case, costs in rows:
    between = case.figures["wire_GB"].get("between slices", 0.0)
    cells = [case.title, case.impl]
    for actual, expected in ((case.figures["peak_GB"], costs.peak), (case.figures["wire_total_GB"], costs.sent)):
      cells += [tables.number(actual, 2), tables.number(expected / 1e9, 2), f"{expected / 1e9 / actual - 1:+.0%}"]
    cells += (
        [tables.number(between, 2), tables.number(costs.between_slices / 1e9, 2)] if between else [tables.MISSING] * 2
    )
    lines.append(tuple(cells))
  return "\n".join([_INTRODUCTION, tables.markdown(_HEADER, lines)]) + "\n"


def main(argv: list[str] | None = None) -> None:
  parser = argparse.ArgumentParser(prog="python -m benchmarks.plan_error", description=__doc__.splitlines()[0])
  parser.add_argument("--output", type=pathlib.Path, default=compile_step.RESULTS / "plan_error")
  options = parser.parse_args(argv)
  text = report([(case, predicted(case)) for case in cases()])
  options.output.with_suffix(".md").write_text(text, encoding="utf-8")
  print(text)


if __name__ == "__main__":
  main()

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Compares the closed forms and estimated seconds of `maxtext-pp plan` with the TPU compiler's figures of the same steps.

  python -m benchmarks.plan_error

It compiles nothing. It predicts every row that compiler_figures, scaling and policies have computed, and writes
`results/plan_error.{json,md}`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
import functools
import pathlib
import re
from typing import Any, NamedTuple

from benchmarks import compile_step, scaling, shapes, tables
from maxtext_pp_ext.hardware import chips

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
    "step s, projected",
    "estimated",
    "error",
)
_INTRODUCTION = """# Closed forms against the compiler

`python -m benchmarks.plan_error` printed this: what `maxtext-pp plan` predicts (`maxtext_pp_ext/plan/costs.py`) for the \
rows of [compiler_figures.md](compiler_figures.md), [scaling.md](scaling.md) and [policies.md](policies.md), per chip \
and step.

- Peak memory is the memory that a chip needs at once.
- If weights are gathered at each use (circular), the compiler turns some gathers into loops of permutes inside the \
matrix multiplication. The closed forms do not include that; of none they do.
- GB sent has the buffers of ragged all-to-alls, as the column "ragged" of compiler_figures.md: these have room for all \
tokens that may come.
- Step: seconds projected from the compiled program (docs/seconds.md), which is no measurement, and estimated before \
anything is compiled (`maxtext_pp_ext/plan/estimate.py`). Rows compiled with XLA flags have only these.
"""


# Arguments that change nothing about a layer and a token on one device.
_NOT_OF_LAYERS = re.compile(
    r"(\w+_(pipeline|fsdp)_parallelism|num_(pipeline|layers_per_pipeline)\w+|pipeline_\w+|compile_\w+|remat_policy"
    r"|\w+=(device|offload|remat)$|per_device_batch_size|gradient_accumulation_steps)"
)
_NEARLY = 1.02  # times as many seconds as the fastest take hardly longer
_LAYERS: dict[tuple[str, ...], Any] = {}  # what was read of the layers of these arguments


class Case(NamedTuple):
  """A step that was compiled."""

  title: str  # the shape's title
  impl: str  # the row's name: a key of `shapes.IMPLEMENTATIONS`, then sets of XLA flags
  arguments: list[str]  # MaxText's command-line arguments
  figures: dict[str, Any]  # the compiler's figures

  @property
  def projected(self) -> float | None:
    """The seconds of a step that were projected from the compiled program; None in rows older than the projection."""
    return self.figures.get("projection", {}).get("step_s")

  @property
  def accumulates_over_slices(self) -> bool:
    """Whether the step has several parts by `gradient_accumulation_steps`, and several slices: memory is off by half."""
    keys = dict(each.split("=", 1) for each in self.arguments if "=" in each)
    return keys.get("gradient_accumulation_steps", "1") != "1" and keys.get("compile_topology_num_slices", "1") != "1"


def cases(results: pathlib.Path = compile_step.RESULTS) -> Iterator[Case]:
  """Every row of compiler_figures, scaling and policies that has closed forms; of those with XLA flags the projected."""
  rows = {name: (shapes.SHAPES[name], each) for name, each in tables.read(results / "compiler_figures.json").items()}
  points = tables.read(results / "scaling.json")
  known = dict[tuple[str, str], str]()  # the first point of each program
  for _, series in scaling.SERIES.values():
    for point in series:
      label = scaling.label(point)
      program = lambda row, point=point: (scaling.program(point, shapes.implementation_of(row)), row)
      own = {row: each for row, each in points.get(label, {}).items() if known.setdefault(program(row), label) == label}
      rows[label] = scaling.shape(point), own
  for title, (shape, each) in rows.items():
    for impl, figures in each.items():
      case = Case(title, impl, figures.get("arguments") or shapes.arguments(shape, impl), figures)
      if "failure" in figures or impl.startswith("host") or case.accumulates_over_slices:
        continue
      if impl in shapes.IMPLEMENTATIONS or case.projected:
        yield case
  for shape_name, of_policies in tables.read(results / "policies.json").items():
    for policy, each in of_policies.items():
      for impl, figures in each.items():
        if "failure" not in figures:
          yield Case(f"{shape_name}, {policy}", impl, figures["arguments"], figures)


def predicted(case: Case) -> Any:
  """The `Costs` of a case by the closed forms, and the `Estimate` of its seconds."""
  import maxtext_pp_ext

  maxtext_pp_ext.install()
  from maxtext_pp_ext import presets
  from maxtext_pp_ext.config import derived
  from maxtext_pp_ext.host.models import run_config
  from maxtext_pp_ext.plan import quantities
  from maxtext_pp_ext.plan.layers import layers_of

  arguments = case.arguments
  if "=" not in arguments[0]:
    arguments = [presets.path(arguments[0]), *arguments[1:]]
  config = run_config.read_without_run(arguments)
  scheduled = config.using_pipeline_parallelism or derived.windowed(config)
  schedule = run_config.schedule_of(config) if scheduled else None
  impl = derived.pipeline_impl(config)
  chip = chips.of_topology(config.compile_topology)
  of_model = tuple(each for each in arguments if not _NOT_OF_LAYERS.match(each))
  if of_model not in _LAYERS:
    _LAYERS[of_model] = layers_of(config)
  changed = dict.fromkeys(of_model, True) | {"pipeline_parallel_layers": config.pipeline_parallel_layers}
  explained, mesh = _models().explained(config, changed)
  return quantities.predictor(config, explained, mesh, chip, _LAYERS[of_model])(impl, schedule)


@functools.cache
def _models() -> Any:
  from maxtext_pp_ext.host.models import abstract_model

  return abstract_model.Models(())


def figures(costs: Any, estimate: Any) -> dict[str, float]:
  """What is predicted of a step, under the names that the compiler's figures have."""
  predictions = {"peak_GB": costs.peak / 1e9, "wire_total_GB": costs.sent / 1e9, "step_s": estimate.seconds}
  return {**predictions, "between_slices_GB": costs.between_slices / 1e9}


def report(rows: list[tuple[Case, Any]], introduction: str = _INTRODUCTION) -> str:
  """The Markdown file: a table of cases and what is predicted of each."""
  lines = []
  for case, (costs, estimate) in rows:
    between = case.figures["wire_GB"].get("between slices", 0.0)
    cells = [case.title, case.impl]
    for actual, expected in ((case.figures["peak_GB"], costs.peak), (case.figures["wire_total_GB"], costs.sent)):
      error = f"{expected / 1e9 / actual - 1:+.0%}" if actual else tables.MISSING
      cells += [tables.number(actual, 2), tables.number(expected / 1e9, 2), error]
    cells += (
        [tables.number(between, 2), tables.number(costs.between_slices / 1e9, 2)] if between else [tables.MISSING] * 2
    )
    if case.projected:
      error = estimate.seconds / case.projected - 1
      cells += [tables.number(case.projected, 2), tables.number(estimate.seconds, 2), f"{error:+.0%}"]
    else:
      cells += [tables.MISSING] * 3
    lines.append(tuple(cells))
  return "\n".join([introduction, tables.markdown(_HEADER, lines)]) + "\n"


def ranking(rows: Iterable[tuple[Case, Any]]) -> str:
  """How often the implementation that is predicted to be the fastest of a shape is, or takes `_NEARLY` as long at most.

  Each implementation has its fastest row, and rows that keep activations are compared with such rows.
  """
  groups: dict[tuple[str, bool], dict[str, tuple[float, float]]] = {}  # -> implementation -> (projected, predicted)
  for case, (_, estimate) in rows:
    if case.projected:
      of_shape = groups.setdefault((case.title, shapes.keeps(case.impl)), {})
      impl, found = shapes.implementation_of(case.impl), (case.projected, estimate.seconds)
      of_shape[impl] = min(of_shape.get(impl, found), found)
  several = [list(each.values()) for each in groups.values() if len(each) > 1]
  right = sum(min(each, key=lambda row: row[1])[0] <= _NEARLY * min(each)[0] for each in several)
  return (
      f"In {right} of {len(several)} shapes, with or without kept activations, the implementation predicted to be "
      f"the fastest is, or takes {_NEARLY} times as long at most. Each has its fastest row.\n"
  )


def main(argv: list[str] | None = None) -> None:
  parser = argparse.ArgumentParser(prog="python -m benchmarks.plan_error", description=__doc__.splitlines()[0])
  parser.add_argument("--output", type=pathlib.Path, default=compile_step.RESULTS / "plan_error")
  options = parser.parse_args(argv)
  rows = [(case, predicted(case)) for case in cases()]
  results: dict[str, dict[str, dict[str, float]]] = {}
  for case, found in rows:
    results.setdefault(case.title, {})[case.impl] = figures(*found)
  tables.write(options.output.with_suffix(".json"), results)
  text = report(rows) + "\n" + ranking(rows)
  options.output.with_suffix(".md").write_text(text, encoding="utf-8")
  print(text)


if __name__ == "__main__":
  main()

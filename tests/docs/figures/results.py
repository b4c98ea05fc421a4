# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The tables of benchmarks/results, with names for what sentences take from them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
import functools
import math
import pathlib
import re
from typing import Any, NamedTuple

from benchmarks import compile_step, first_page, plan_error, scaling, shapes, tables
from benchmarks import overlap as overlap_benchmark
from benchmarks import published as published_benchmark
from maxtext_pp_ext.compiled import step_times
from maxtext_pp_ext.compiled.program import collectives
from maxtext_pp_ext.compiled.projection import costs

CHECKOUT = pathlib.Path(__file__).resolve().parents[3]
VMEM = "DENSE_VMEM_LIMIT_FLAG"
SPARSECORES = (VMEM, "ENABLE_SPARSECORE_OFFLOADING_FOR_RS_AG_AR", "without xla_sc_disjoint_spmem")
ASYNC_DISPATCH = "ENABLE_ASYNC_RAGGED_ALL_TO_ALL"
# Models with experts and MaxText's default dispatch.
WITH_EXPERTS = ("mixtral-8x7b-dropless", "llama4-17b-16e", "gpt-oss-120b", "qwen3-235b-a22b", "deepseek3-671b-4096")
_NUMERATORS = {1: "a", 2: "two", 3: "three", 4: "four"}
_DENOMINATORS = {3: "third", 4: "quarter", 5: "fifth"}
_FRACTIONS = {"half": 1 / 2} | {
    f"{_NUMERATORS[above]} {_DENOMINATORS[below]}{'s' if above > 1 else ''}": above / below
    for below in _DENOMINATORS
    for above in range(1, below)
    if (above, below) != (2, 4)
}


def held_back(what: str, read: bool = False) -> tuple[str, str, str]:
  """How far off "Seconds" or "Memory" of steps held back are, on average and at most, and of how many steps.

  `read` says whether of models whose programs were read for `plan`.
  """
  text = text_of("benchmarks/results/held_back.md")
  found = re.findall(rf"{what} (?:is|are) off by ([\d.]+)% on average and (\d+)% at most \((\d+) programs\)", text)
  average, most, programs = found[read]
  return percent(float(average) / 100), f"{most} %", programs


class Ratios(NamedTuple):
  """Of the window to none, under each policy of policies.json but `full`."""

  steps: list[float]
  peaks: list[float]


def policies(shape: str) -> Ratios:
  pairs = [rows for policy, rows in table("policies")[shape].items() if policy != "full" and len(rows) == 2]
  steps = [rows["window"]["projection"]["step_s"] / rows["none"]["projection"]["step_s"] for rows in pairs]
  told = [rows for rows in pairs if rows["none"]["peak_GB"]]
  return Ratios(steps, [rows["window"]["peak_GB"] / rows["none"]["peak_GB"] for rows in told])


def between(ratios: Sequence[float]) -> str:
  return f"{min(ratios):.2f} to {max(ratios):.2f}"


@functools.cache
def text_of(page: str) -> str:
  return (CHECKOUT / page).read_text(encoding="utf-8")


@functools.cache
def table(name: str) -> dict[str, Any]:
  """Returns all of a table, a JSON file of benchmarks/results."""
  return tables.read(compile_step.RESULTS / f"{name}.json")


class Step:
  """A compiled step of a table; GB and seconds of a chip."""

  def __init__(self, figures: dict[str, Any]):
    self.peak, self.temp, self.sent = figures["peak_GB"], figures["temp_GB"], figures["wire_total_GB"]
    self.between_slices = figures["wire_GB"].get(collectives.BETWEEN_SLICES, 0.0)
    self.compile_seconds = figures["compile_cpu_s"]
    self.projection = figures.get("projection", {})

  @property
  def seconds(self) -> float:
    """Seconds of a step, projected."""
    return self.projection["step_s"]

  @property
  def compute(self) -> float:
    """Of these seconds, those of compute."""
    return self.projection["compute_s"]

  @property
  def dispatch(self) -> float:
    """Of these seconds, those in which layers wait for the dispatch."""
    parts = self.projection["parts"].items()
    return sum(seconds for part, seconds in parts if part.startswith(f"{costs.TRANSFERS}: dispatch"))


def compiled(shape: str, impl: str, *flags: str) -> Step:
  """Returns a row of compiler_figures.md."""
  return Step(table("compiler_figures")[shape][", ".join([impl, *flags])])


def fastest(shape: str, impl: str, *names: str, keeps: bool = False) -> Step:
  """Returns the fastest row of compiler_figures.md with these sets of flags, and maybe others."""
  rows = table("compiler_figures")[shape].items()
  named = {impl, *names}
  of = [Step(row) for name, row in rows if shapes.keeps(name) == keeps and named <= set(name.split(", "))]
  return min(of, key=lambda step: step.seconds)


def best(shape: str, impl: str) -> Step:
  """Returns the fastest row of an implementation in compiler_figures.md, whatever its policy and flags."""
  return Step(first_page.best(table("compiler_figures"), shape, impl))


IN_8_MICROBATCHES = [f"{name}-8-batches" for name in ("llama3-70b", "llama3-8b", "mixtral-8x7b")]


def in_8_microbatches(shape: str) -> list[Step]:
  """Returns the fastest rows with 8 batches: accumulated without a window, in one, and in 8 microbatches in a window."""
  parts = best(shape.replace("-batches", "-parts"), "window")
  return [best(shape, "none"), parts, best(shape, "window")]


def scaled(impl: str, **point: int) -> Step:
  """Returns a row of scaling.md; `point` has what differs from the middle of its series."""
  return Step(table("scaling")[scaling.label(point)][impl])


def overlapping(impl: str) -> Step:
  """Returns a row of overlap.md."""
  return Step(table("overlap")[impl])


def beside_compute(impl: str, transfer: str) -> float:
  """Returns the share of the bytes of a transfer of overlap.md that have compute meanwhile."""
  return table("overlap")[impl]["transfers"][transfer]["compute_meanwhile"]


def hidden(impl: str) -> float:
  """Returns the share of the seconds of overlap.md's transfers that compute hides."""
  of = overlap_benchmark.hidden(table("overlap")[impl]["projection"])
  return 1 - of.waited / of.seconds


def wall_time(impl: str) -> float:
  """Returns the step time on CPU devices in parts of that of the plain pipeline (wall_time.md)."""
  seconds = {name: pipeline["seconds"] for name, pipeline in table("wall_time")["pipelines"].items()}
  return step_times.ratio(seconds[impl], seconds[shapes.PLAIN])["median"]


def published() -> dict[str, float]:
  """Returns how far each run of published.md is off, 0.1 if it is 10 % too long."""
  runs, projected = published_benchmark.runs(), published_benchmark.projections(table("published"), "none")
  return {name: published_benchmark.error(runs[name], projection) for name, projection in projected.items()}


def plan_errors() -> dict[tuple[str, str], dict[str, float]]:
  """Returns how far plan is off for each row of plan_error.md, 0.1 if it predicts 10 % too much."""
  found = {}
  for case in plan_error.cases():
    row = table("plan_error")[case.title][case.impl]
    actual = {
        "peak_GB": case.figures["peak_GB"],
        "wire_total_GB": case.figures["wire_total_GB"],
        "step_s": case.projected,
    }
    found[case.title, case.impl] = {name: row[name] / value - 1 for name, value in actual.items() if value}
  return found


@functools.cache
def predicted(shape: str, impl: str) -> Any:
  """Returns the `Costs` and the `Estimate` by plan's formulas of a row of compiler_figures.md or scaling.md."""
  [case] = (case for case in plan_error.cases() if (case.title, case.impl) == (shape, impl))
  return plan_error.predicted(case)


def percent(value: float) -> str:
  """Returns a share as the pages write it: `13 %`."""
  return f"{value * 100:.0f} %"


def within(errors: Iterable[float]) -> str:
  """Returns the bound of errors of either sign, in whole percent: `8 %`."""
  return f"{math.ceil(max(map(abs, errors)) * 100)} %"


def span(shares: Iterable[float], digits: int = 0) -> str:
  """Returns the least and the most of shares, in percent: `1 to 13`."""
  percents = [each * 100 for each in shares]
  return f"{min(percents):.{digits}f} to {max(percents):.{digits}f}"


def fraction(value: float) -> str:
  """Returns the simple fraction that is nearest, in words: `a quarter`, `two thirds`."""
  return min(_FRACTIONS, key=lambda words: abs(_FRACTIONS[words] - value))

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""How memory, traffic and compile time grow with stages, repeats, microbatches and model size.

  python -m benchmarks.scaling [--series stages …] [--impl …] [--keep]

It compiles small Llama models for a v5p-32 (16 chips) and changes one number at a time. Writes
`results/scaling.{json,md,svg}`; computed points replace those of an earlier run, the others stay.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from typing import Any

from rich import console as rich_console

from benchmarks import compile_step, shapes, tables
from maxtext_pp_ext.compiled import flags
from maxtext_pp_ext.host.models import variants
from maxtext_pp_ext.processes import interruption

_CHIPS = 16
_BASE = {"stages": 4, "repeats": 4, "layers": 1, "microbatches": 8, "embed": 2048}
# Of each series the axis label, and the values that differ from _BASE at each point.
SERIES: dict[str, tuple[str, list[dict[str, int]]]] = {
    "stages": (
        "stages (16 layers; the other chips are FSDP)",
        [{"stages": stages, "repeats": 16 // stages} for stages in (2, 4, 8)],
    ),
    "repeats": ("repeats (4 layers each)", [{"repeats": repeats} for repeats in (2, 4, 8)]),
    "layers": (
        "layers per stage (16 layers)",
        [{"layers": layers, "repeats": 4 // layers} for layers in (1, 2, 4)],
    ),
    "microbatches": ("microbatches (same batch)", [{"microbatches": microbatches} for microbatches in (4, 8, 16)]),
    "embed": ("embedding (MLP four times that)", [{"embed": embed} for embed in (1024, 2048, 4096)]),
}
_FIGURES = {
    "step_s": "step s, projected",
    "peak_GB": "peak GB per chip",
    "wire_total_GB": "GB on the wire per chip",
    "compile_cpu_s": "compile CPU s",
}
_HEADER = (
    "series",
    "value",
    "pipeline",
    "step s, projected",
    "peak GB",
    "temp GB",
    "GB on the wire",
    "weight gathers",
    "compile CPU s",
)
_IMPLEMENTATIONS = (shapes.PLAIN, "host BSW", "circular_bsw")
_KEPT: dict[str, object] = {"remat_policy": "minimal_with_context"}
# Sets of XLA flags. Without this one XLA gathers these weights within products, which takes up to twice the time.
_SETS = {variants.NONE: ["DISABLE_COLLECTIVE_MATMUL"]}
_INTRODUCTION = f"""# Scaling

`python -m benchmarks.scaling` printed this: Llama layers on a v5p-32 ({_CHIPS} chips), sequence 1024, 4 sequences per \
chip. Unless the table says otherwise: {_BASE["stages"]} stages × FSDP {_CHIPS // _BASE["stages"]}, {_BASE["repeats"]} \
repeats, {_BASE["microbatches"]} microbatches, embedding {_BASE["embed"]}. Per chip and step, from the TPU compiler; \
columns as in `compiler_figures.md`, in parentheses the ratio to MaxText's plain pipeline. Kept activations \
(`--keep`): with remat_policy={_KEPT["remat_policy"]}; other rows have full. Points with the same program \
without a pipeline share its figures.

![Memory, traffic and compile time](scaling.svg)
"""


def shape(point: dict[str, int]) -> shapes.Shape:
  """The shape of a point, which has the values that differ from the base."""
  values = {**_BASE, **point}
  embed = values["embed"]
  keys = {
      "compile_topology": "v5p-32",
      "ici_pipeline_parallelism": values["stages"],
      "ici_fsdp_parallelism": _CHIPS // values["stages"],
      "base_num_decoder_layers": values["stages"] * values["repeats"] * values["layers"],
      "num_pipeline_repeats": values["repeats"],
      "num_layers_per_pipeline_stage": values["layers"],
      "num_pipeline_microbatches": values["microbatches"],
      "per_device_batch_size": 4,
      "max_target_length": 1024,
      "base_emb_dim": embed,
      "base_mlp_dim": 4 * embed,
      "base_num_query_heads": embed // 128,
      "base_num_kv_heads": embed // 128,
      "head_dim": 128,
      "vocab_size": 32000,
  }
  return shapes.Shape(title="", keys=keys, kept=_KEPT)


def label(point: dict[str, int]) -> str:
  """A label that is equal for equal shapes, so that a point that several series share is compiled once."""
  values = {**_BASE, **point}
  return " ".join(f"{key}={value}" for key, value in values.items() if key != "layers" or value != 1)


def program(point: dict[str, int], impl: str) -> str:
  """A label that is equal for equal programs: without a pipeline, stages and microbatches change nothing."""
  values = {**_BASE, **point}
  layers = values["stages"] * values["repeats"] * values["layers"]
  return f"layers={layers} embed={values['embed']}" if impl == variants.NONE else label(point)


def _row(impl: str, *, keeps: bool) -> str:
  return shapes.row_name(impl, keeps=keeps, sets=_SETS.get(impl, ()))


def main(argv: list[str] | None = None) -> None:
  options = _parse(argv)
  console = rich_console.Console()
  points = tables.read(options.output.with_suffix(".json"))
  same: dict[tuple[str, str], dict[str, Any]] = {}
  for series in options.series:
    for point in SERIES[series][1]:
      for impl in options.impl:
        row = _row(impl, keeps=options.keep)
        extra = {flags.KEY: flags.joined("", _SETS[impl], [])} if impl in _SETS else None
        arguments = shapes.arguments(shape(point), impl, extra, keeps=options.keep)
        if (of_it := (program(point, impl), row)) not in same:
          same[of_it] = compile_step.compile_step(
              arguments,
              label=f"{series}, {label(point)}, {row}",
              names=list(of_it),
              options=options,
              console=console,
          )
        figures = same[of_it] | {"arguments": arguments, "versions": compile_step.versions()}
        points.setdefault(label(point), {})[row] = figures
        write(points, options.output)
  console.print(report(points), markup=False, highlight=False, soft_wrap=True)


def write(points: dict[str, dict[str, Any]], output: pathlib.Path) -> None:
  """Writes all results; called after every point, so that an interrupted run keeps its points."""
  tables.write(output.with_suffix(".json"), points)
  output.with_suffix(".md").write_text(report(points), encoding="utf-8")
  plot(points, output.with_suffix(".svg"))


def report(points: dict[str, dict[str, Any]]) -> str:
  rows, failures = [], []
  for series, (_, each) in SERIES.items():
    for point in each:
      of_point = points.get(label(point), {})
      for impl, row in of_point.items():
        base = of_point.get(shapes.row_name(shapes.PLAIN, keeps=shapes.keeps(impl)), {})
        if "failure" in row:
          failures.append(f"- {series} {point[series]}, {impl}: {row['failure']}")
          continue
        rows.append(
            (
                series,
                str(point[series]),
                impl,
                tables.with_ratio(_figure(row, "step_s"), _figure(base, "step_s"), 3),
                tables.with_ratio(row["peak_GB"], base.get("peak_GB"), 2),
                *(tables.number(row[key], 2) for key in ("temp_GB", "wire_total_GB")),
                str(row["weight_gathers"]),
                tables.number(row.get("compile_cpu_s"), 0),
            )
        )
  parts = [_INTRODUCTION, tables.markdown(_HEADER, rows)]
  return "\n".join(parts + (["\nNot computed:\n", *failures] if failures else [])) + "\n"


def _figure(row: dict[str, Any], key: str) -> float | None:
  return row.get("projection", {}).get(key) if key == "step_s" else row.get(key)


def plot(points: dict[str, dict[str, Any]], file: pathlib.Path) -> None:
  """A row for each figure, a column for each series, a line for each pipeline. Points without a result are left out."""
  import matplotlib

  matplotlib.use("Agg")
  matplotlib.rcParams["svg.hashsalt"] = "maxtext_pp_ext"  # equal pictures give equal files
  from matplotlib import pyplot

  figure, axes = pyplot.subplots(
      len(_FIGURES), len(SERIES), figsize=(3.2 * len(SERIES), 2.6 * len(_FIGURES)), squeeze=False
  )
  for column, (series, (title, each)) in enumerate(SERIES.items()):
    for row, (key, name) in enumerate(_FIGURES.items()):
      axis = axes[row][column]
      for impl in (_row(impl, keeps=keeps) for keeps in (False, True) for impl in shapes.IMPLEMENTATIONS):
        found = [(point[series], _figure(points.get(label(point), {}).get(impl, {}), key)) for point in each]
        found = [(x, y) for x, y in found if y is not None]
        if found:
          style = "--" if shapes.keeps(impl) else "-"
          axis.plot(*zip(*found, strict=True), linestyle=style, marker="o", markersize=4, label=impl)
      axis.set_xscale("log", base=2)
      axis.set_xticks([point[series] for point in each], [str(point[series]) for point in each])
      axis.minorticks_off()
      axis.set_ylim(bottom=0)
      axis.grid(alpha=0.3)
      if column == 0:
        axis.set_ylabel(name)
      if row == len(_FIGURES) - 1:
        axis.set_xlabel(title, fontsize=8)
  handles, labels = axes[0][0].get_legend_handles_labels()
  figure.legend(handles, labels, loc="upper center", ncols=max(len(labels), 1), frameon=False)
  figure.tight_layout(rect=(0, 0, 1, 0.95))
  figure.savefig(file, metadata={"Date": None})
  pyplot.close(figure)


def _parse(argv: list[str] | None) -> argparse.Namespace:
  parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=__doc__.splitlines()[0])
  parser.add_argument("--series", nargs="+", choices=list(SERIES), default=list(SERIES), metavar="NAME")
  parser.add_argument("--keep", action="store_true", help="with kept activations, not remat full")
  return compile_step.parse(parser, argv, output="scaling", impl=list(_IMPLEMENTATIONS), minutes=15.0)


if __name__ == "__main__":
  sys.exit(interruption.run(main, "scaling"))

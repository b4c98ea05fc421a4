# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Memory, traffic and compile time of MaxText's pipelines and ours, from the TPU compiler on a machine without a TPU.

  python -m benchmarks.compiler_figures                                    every shape and implementation
  python -m benchmarks.compiler_figures --shape llama3-70b --impl circular_bsw host-plain

  python -m benchmarks.compiler_figures --shape llama3-70b --flags DENSE_VMEM_LIMIT_FLAG    rows with MaxText's XLA flags
  python -m benchmarks.compiler_figures --shape llama3-70b --flags best    each pipeline's own best sets, searched for
  python -m benchmarks.compiler_figures --shape llama3-70b --keep    rows with the remat policy of a published recipe

Needs the extra `tools` (libtpu) and about 6 GiB of host memory per row. Computed rows replace those of an earlier run in
`results/compiler_figures.{json,md}`; the others stay. A row that cannot be computed gives the reason. A search of flags
compiles each row about 20 times; one that was ended goes on where it was.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from typing import Any

from rich import console as rich_console

from benchmarks import compile_step, shapes, tables
from maxtext_pp_ext.compiled import best_flags, flags
from maxtext_pp_ext.compiled.program import collectives
from maxtext_pp_ext.compiled.projection import costs
from maxtext_pp_ext.processes import interruption

SHAPES = ("llama3-70b", "llama3-8b-dcn", "mixtral-8x7b")
_ORDER = tuple(shapes.IMPLEMENTATIONS)
_HEADER: tuple[str, ...] = (
    "pipeline",
    "step s, projected",
    "temp GB",
    "peak GB",
    "arg GB",
    "GB on the wire",
    "gather",
    "reduce-scatter",
)
_HEADER += ("all-reduce", "permute", "all-to-all", "ragged", "balanced", "between slices", "weight gathers")
_HEADER += ("compile CPU s",)
# What is sent, and what a step's seconds go to, of models with experts. A part's name begins with one of its prefixes.
_PURPOSES = {
    "weights GB": ("weights",),
    "gradients GB": ("gradients",),
    "activations between stages GB": ("activations over stage",),
    "dispatch, combine GB": ("dispatch",),
    "elsewhere GB": ("activations", "elsewhere", "not told"),
}
_NOMINAL = "at_nominal_rate_s"
_FLOPS = "PFLOP of products, without kernels"
_SECONDS = {
    "kernels s": ("kernels",),
    "products s": ("products",),
    "other compute s": ("other compute",),
    "waits for weights, gradients s": (f"{costs.TRANSFERS}: weights", f"{costs.TRANSFERS}: gradients"),
    "waits for dispatch s": (f"{costs.TRANSFERS}: dispatch",),
    "other waits s": (costs.TRANSFERS, costs.MEMORY, costs.DEVICES),
}
_INTRODUCTION = """# Compiler figures

`python -m benchmarks.compiler_figures` printed this. All figures are per chip and step; in parentheses the ratio to \
MaxText's plain pipeline. The TPU compiler reports them without a TPU, so they do not depend on the machine, compile \
time excepted (seconds of all processors together).

- step: seconds, projected from the compiler's own estimate of cycles and the bandwidth of the links that transfers go \
over (docs/seconds.md); not a measurement. ≤: there are conditionals of which the projection cannot tell which branch is \
taken, so the longest one counts each time. A row without it is older than the projection, and may count permutes inside \
matrix multiplications twice.
- temp: the sum of the compiler's temporary buffers, as if they did not reuse one another's memory, without arguments. \
peak: the memory that a chip needs at once, arguments included; none where activations go to the host's memory, which \
the compiler would count, too. arg: weights, optimizer state and batch.
- GB on the wire: the bytes that a chip sends, by collective and in total (including those between slices). Gather, \
reduce-scatter and all-to-all send (g−1)/g of the whole array in a group of g, all-reduce twice that, a permute its \
operand. A gather that the compiler turned into permutes inside a matrix multiplication counts as permutes.
- ragged: of ragged all-to-alls, the buffers that receive tokens; they have room for all tokens that may come, and count \
in the total. balanced: what is sent if every device gets equally many tokens; seconds count these.
- weight gathers: all-gathers of floating-point arrays of 1 MiB and more that run in a \
step; if a weight is gathered in chunks, each chunk counts.
- PFLOP: of conditionals the branch counts that the program takes. "≤": an older row, which counts all branches, up to a \
third too many.
- A name after the pipeline is a set of MaxText's XLA flags (`--flags`, maxtext_pp_ext/compiled/flags.py), or a flag of \
these sets that is left out, since this libtpu refuses it for the chip (`--without`).
- kept activations: with the remat policy that `benchmarks/shapes.py` has for the shape; other rows have full.
- Ratios compare rows without flags with such rows, and each pipeline's fastest flags with those of MaxText's plain one.
- none: without a pipeline; FSDP uses the chips of the stages.
- between slices: for a collective over several slices, the bytes that one slice's part of it sends. Rows without \
projected seconds are older and count the operand of every transfer, which is 4 % less for our pipelines.
- step s at the nominal rate: over several slices, with the nominal rate of their network instead of the measured one \
(docs/seconds.md).
- host BSW (`pipeline_fsdp_ag_per_repeat=true`) computes wrong values with 3 or more stages in MaxText 0.2.5; its \
figures are those of a wrong program.
"""


def main(argv: list[str] | None = None) -> None:
  options = _parse(argv)
  console = rich_console.Console()
  results = tables.read(options.output.with_suffix(".json"))
  for name in options.shape:
    for impl in options.impl:
      of = _Rows(name=name, impl=impl, options=options, console=console, results=results)
      if options.flags == [best_flags.BEST]:
        best_flags.search(of.compiled)
      else:
        value = flags.joined("", options.flags, options.without)
        of.compiled(best_flags.Flags(value, tuple(options.flags), tuple(options.without)))
  for name in options.shape:
    console.print(_section(name, results[name]), markup=False, highlight=False, soft_wrap=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Rows:
  """The rows of an implementation of a shape."""

  name: str  # of the shape
  impl: str
  options: argparse.Namespace
  console: rich_console.Console
  results: dict[str, dict[str, Any]]  # shape -> row -> figures; what is computed is added and written

  def compiled(self, given: best_flags.Flags) -> dict[str, Any]:
    """The figures with some flags. A search takes those that an earlier one has written with the same versions.

    Failures are tried again: limits may be others now.
    """
    options, rows = self.options, self.results.setdefault(self.name, {})
    row_name = shapes.row_name(self.impl, keeps=options.keep, sets=given.sets, without=given.without)
    extra = {flags.KEY: given.value} if given.value else None
    arguments = shapes.arguments(shapes.SHAPES[self.name], self.impl, extra, keeps=options.keep)
    of = {"arguments": arguments, "versions": compile_step.versions()}
    known = rows.get(row_name, {})
    is_final = "failure" not in known or best_flags.lacks_a_flag(known)
    if options.flags == [best_flags.BEST] and not options.read and is_final and {key: known.get(key) for key in of} == of:
      return known
    figures = compile_step.compile_step(
        arguments,
        label=f"{self.name}, {row_name}",
        names=[self.name, row_name],
        options=options,
        console=self.console,
    )
    rows[row_name] = figures | of
    tables.write(options.output.with_suffix(".json"), self.results)
    options.output.with_suffix(".md").write_text(report(self.results), encoding="utf-8")
    return rows[row_name]


def report(results: dict[str, dict[str, Any]]) -> str:
  """The Markdown file: a table for each shape that has rows."""
  return "\n".join([_INTRODUCTION, *(_section(name, results[name]) for name in shapes.SHAPES if name in results)])


def _section(name: str, rows: dict[str, dict[str, Any]]) -> str:
  ordered = sorted(rows, key=lambda row: (_ORDER.index(shapes.implementation_of(row)), row))
  fastest = _fastest(rows)
  computed = [row for row in ordered if "failure" not in rows[row] and row in fastest.values()]
  # Default flags are compared with default flags, and the best ones with the best.
  base = {row: rows.get(fastest.get((shapes.PLAIN, *_kind(row)), ""), {}) for row in computed}
  header, cells = _HEADER, [_row(row, rows[row], base[row]) for row in computed]
  at_nominal = [rows[row].get("projection", {}).get(_NOMINAL) for row in computed]
  if any(at_nominal):
    header += ("step s at the nominal rate",)
    cells = [(*row, tables.number(seconds, 3)) for row, seconds in zip(cells, at_nominal, strict=True)]
  table = tables.markdown(header, cells)
  failures = [f"- {row}: {rows[row]['failure']}" for row in ordered if "failure" in rows[row]]
  slower = [row for row in ordered if "failure" not in rows[row] and row not in computed]
  parts = [f"## {shapes.SHAPES[name].title}", f"`python -m benchmarks.compiler_figures --shape {name}`"]
  parts += [table] if computed else []
  told = [row for row in computed if "transfers_GB" in rows[row].get("projection", {})]
  if told and "ici_expert_parallelism" in shapes.SHAPES[name].keys:
    parts.append(tables.markdown(("pipeline", *_PURPOSES, _FLOPS, *_SECONDS), [_parts(row, rows[row]) for row in told]))
  parts += tables.scaled((row, rows[row]) for row in computed)
  if slower:
    seconds = [f"- {row}: {tables.number(_projected(rows[row]), 3)} s" for row in slower]
    parts.append("Slower with other sets of flags:\n\n" + "\n".join(seconds))
  parts += ["Not computed:\n\n" + "\n".join(failures)] if failures else []
  given = lambda keys: " ".join(f"{key}={value}" for key, value in keys.items())
  shape = shapes.SHAPES[name]
  keys = given(shape.keys)
  others = (("none and window", shape.one_stage), ("none", shape.without))
  differing = "".join(f"; of {rows_of}: `{given(of_them)}`" for rows_of, of_them in others if of_them)
  used = {", ".join(f"{package} {version}" for package, version in row["versions"].items()) for row in rows.values()}
  preset = shape.preset
  keys = f"{keys}`, with the preset `{preset}` instead of `base.yml" if preset else keys
  return (
      "\n\n".join(
          [
              *parts,
              f"MaxText's keys: `{keys}`{differing}. Versions: {'; '.join(sorted(used))}.",
          ]
      )
      + "\n"
  )


def _kind(row: str) -> tuple[bool, bool]:
  """Rows of one kind are compared: with kept activations or without, with flags or without."""
  return shapes.keeps(row), shapes.has_flags(row)


def _fastest(rows: dict[str, dict[str, Any]]) -> dict[tuple[str, bool, bool], str]:
  """(implementation, kind) -> its fastest row; without projections the first."""
  found: dict[tuple[str, bool, bool], str] = {}
  for row in (row for row in rows if "failure" not in rows[row]):
    before = found.setdefault((shapes.implementation_of(row), *_kind(row)), row)
    if (_projected(rows[row]) or math.inf) < (_projected(rows[before]) or math.inf):
      found[shapes.implementation_of(row), *_kind(row)] = row
  return found


def _projected(figures: dict[str, Any]) -> float | None:
  return figures.get("projection", {}).get("step_s")


def _row(impl: str, row: dict[str, Any], base: dict[str, Any]) -> tuple[str, ...]:
  wire = row["wire_GB"]
  kinds = ("all-gather", "reduce-scatter", "all-reduce", "collective-permute", "all-to-all", collectives.RAGGED)
  between = wire.get(collectives.BETWEEN_SLICES, 0.0)
  return (
      impl,
      ("≤ " if row.get("projection", {}).get("unknown") else "")
      + tables.with_ratio(_projected(row), _projected(base), 3),
      tables.with_ratio(row["temp_GB"], base.get("temp_GB")),
      tables.with_ratio(row["peak_GB"], base.get("peak_GB")),
      tables.number(row["arg_GB"]),
      tables.with_ratio(row["wire_total_GB"], base.get("wire_total_GB")),
      *(tables.number(wire.get(kind, 0.0)) for kind in kinds),
      tables.number(row.get("balanced_ragged_GB", 0.0)),
      tables.number(between, 2),
      str(row["weight_gathers"]),
      tables.with_ratio(row.get("compile_cpu_s"), base.get("compile_cpu_s"), 0),
  )


def _parts(impl: str, row: dict[str, Any]) -> tuple[str, ...]:
  """Bytes by purpose, FLOPs, and seconds by part; each part counts for the first column that names it."""
  prefix = f"{costs.TRANSFERS}: "
  sent = {part.removeprefix(prefix): size for part, size in row["projection"]["transfers_GB"].items() if prefix in part}
  found = []
  for columns, parts, digits in ((_PURPOSES, sent, 1), (_SECONDS, row["projection"]["parts"], 2)):
    left = dict(parts)
    for prefixes in columns.values():
      own = [part for part in left if part.startswith(prefixes)]
      found.append(tables.number(sum(left.pop(part) for part in own), digits))
  advances = shapes.implementation_of(impl) in ("circular_bsw", "circular_ag_once")  # others have no conditionals
  counts_all_branches = advances and "conditionals_unknown" not in row
  found.insert(len(_PURPOSES), ("≤ " if counts_all_branches else "") + tables.number(row["dot_flops"] / 1e15, 2))
  return (impl, *found)


def _parse(argv: list[str] | None) -> argparse.Namespace:
  parser = argparse.ArgumentParser(prog="python -m benchmarks.compiler_figures", description=__doc__.splitlines()[0])
  parser.add_argument("--shape", nargs="+", choices=sorted(shapes.SHAPES), default=list(SHAPES), metavar="NAME")
  parser.add_argument("--keep", action="store_true", help="with the shape's policy of kept activations, not remat full")
  sets = "MaxText's sets of XLA flags, or best"
  options = compile_step.parse(parser, argv, output="compiler_figures", impl=list(shapes.IMPLEMENTATIONS), sets=sets)
  if options.keep and (without := [name for name in options.shape if not shapes.SHAPES[name].kept]):
    parser.error(f"--keep: there is no policy of kept activations for {', '.join(without)}.")
  return options


if __name__ == "__main__":
  sys.exit(interruption.run(main, "compiler_figures"))

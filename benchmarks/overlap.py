# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The share of weight gathers and gradient reductions that overlaps compute, from the TPU compiler's schedule.

  python -m benchmarks.overlap                                compile Llama 3 8B for a v6e-64
  python -m benchmarks.overlap --impl circular_bsw --hlo DIR  keep the HLO
  … --hlo DIR --read                                          only read HLO that was kept
  python -m benchmarks.overlap --details …                    print every collective too

The default flags move collectives to the SparseCores, which makes them asynchronous: without them the compiler emits
synchronous gathers. A byte counts as overlapped if a dot, a convolution, a Pallas kernel or a loop with one of them
stands between start and done. Such compute may take less time than the transfer. So the second figure requires as many
FLOPs as a v6e can do while it sends those bytes on all its links.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterable
import pathlib
import sys
from typing import Any, NamedTuple

from rich import console as rich_console

from benchmarks import compile_step, shapes, tables
from maxtext_pp_ext.compiled import spans
from maxtext_pp_ext.compiled.program import collectives, execution, hlo
from maxtext_pp_ext.compiled.projection import costs
from maxtext_pp_ext.hardware import chips
from maxtext_pp_ext.processes import interruption

SHAPE = "llama3-8b-v6e"
_CHIP = chips.CHIPS["v6e"]
FLOPS_PER_BYTE = _CHIP.flops / _CHIP.interconnect
_OFFLOADED = ("all_gather", "reduce_scatter", "all_reduce")
SPARSE_CORE_FLAGS = " ".join(
    [
        *(f"--xla_tpu_enable_async_collective_fusion_fuse_{kind}=false" for kind in _OFFLOADED),
        *(f"--xla_tpu_enable_sparse_core_collective_offload_{kind}=true" for kind in _OFFLOADED),
        *(f"--xla_tpu_enable_{kind}_offload_tracing=true" for kind in _OFFLOADED),
        "--xla_tpu_use_tc_device_shape_on_sc=true",
        "--xla_sc_disable_megacore_partitioning=true",
    ]
)
# The embedding and the output projection are no layer's weights.
_VOCABULARY = 128256
# The numbers of devices that weights are gathered over: FSDP's of 4 stages; without stages FSDP's, and the window's steps
# along the torus of 8 × 8 (engine/transfers/torus.py).
_STAGES, _FSDP = (16,), (64, 8)
_HEADER = ("pipeline", "transfer", "collectives", "GB on the wire", "asynchronous", "compute meanwhile", "enough of it")
_HIDDEN = tuple(f"{costs.TRANSFERS}: {carried} " for carried in ("weights", "gradients"))
_SECONDS_HEADER = (
    *("pipeline", "step s", "transfers s", "not hidden s", "hidden"),
    *("GB on the wire", "with compute beside them"),
)
_SECONDS = """By the projection (docs/seconds.md), which counts how long each transfer and the compute beside it take, \
whatever that computes, the embedding and the output projection included: seconds of a step, of its transfers of weights \
and gradients, and of these the seconds in which compute waits. The last column is the share of the bytes that travel \
while the chip computes."""
_INTRODUCTION = f"""# Overlap of transfers with compute

`python -m benchmarks.overlap` printed this: Llama 3 8B on a v6e-64, 4 stages × FSDP 16, 8 microbatches, or without \
stages FSDP 64 (none, window), collectives on the SparseCores. The table has shares of the bytes that a chip sends for \
the layers' weights and their gradients. Asynchronous: one instruction starts the transfer and another awaits it. \
Compute meanwhile: a matrix multiplication, a Pallas kernel, or a loop with one of them is between the two in the \
schedule. Enough of it: between the two are as many FLOPs as the chip can do while it sends those bytes \
({FLOPS_PER_BYTE:.0f} per byte).

With R repeats of several stages, compute can hide at most (R − 1) / R of the forward gathers and of the reductions: no \
stage computes before the first repeat's weights have arrived, or after the last gradient is complete. Llama 3 8B has 8 \
repeats on 4 stages. Lower shares are the scheduler's choice. It runs one SparseCore transfer at a time, schedules a \
loop's body from its end, and regards a short overlap as enough. So it often overlaps a transfer with the few small \
operations next to it. Host BSW spans a loop with a whole gather, so at most one of a repeat's gathers can be hidden. \
Barriers (`optimization_barrier` in `engine/`) tie our transfers to the activations or gradients next to which they \
should run. They raised the shares from nothing to those below.
"""


def transfers(module: hlo.Module, *, groups: Collection[int], exclude_dim: int) -> dict[str, list[spans.Span]]:
  """The layers' weight gathers of both directions and their gradients' reductions.

  Args:
    module: scheduled HLO of a train step.
    groups: the numbers of devices that weights are gathered over; arrays gathered over other numbers are activations.
    exclude_dim: arrays with a dimension of this size belong to the embedding or the output projection.
  """
  found: dict[str, list[spans.Span]] = {"forward gathers": [], "backward gathers": [], "gradient reductions": []}
  for span in spans.spans(execution.of_module(module)):
    is_large = span.collective.wire_bytes >= collectives.WEIGHT_BYTES and span.array.is_floating
    if not is_large or span.group not in groups or exclude_dim in span.array.dims:
      continue
    if span.collective.kind == "all-gather":
      found["backward gathers" if span.backward else "forward gathers"].append(span)
    elif span.collective.kind in ("reduce-scatter", "all-reduce"):
      found["gradient reductions"].append(span)
  return found


def summary(found: Iterable[spans.Span]) -> dict[str, Any]:
  """The number of collectives per step, their GB, and shares of their bytes."""
  found = list(found)
  total = sum(span.wire_bytes for span in found)

  def share(chosen):
    return round(sum(span.wire_bytes for span in chosen) / total, 3) if total else None

  return {
      "collectives": sum(span.executions for span in found),
      "wire_GB": round(total / 1e9, 3),
      "asynchronous": share(span for span in found if span.asynchronous),
      "compute_meanwhile": share(span for span in found if span.meanwhile),
      "enough_compute": share(
          span for span in found if span.meanwhile.dot_flops >= FLOPS_PER_BYTE * span.collective.wire_bytes
      ),
  }


def details(found: dict[str, list[spans.Span]]) -> str:
  """One line for every collective in the text: its computation, and the compute that runs meanwhile."""
  lines = []
  for kind, each in found.items():
    for span in each:
      state = "synchronous"
      if span.asynchronous:
        kernels = " and kernels" if span.meanwhile.kernels else ""
        state = f"{span.instructions} instructions, {span.meanwhile.dot_flops / 1e9:.1f} GFLOP{kernels} meanwhile"
      dims = ",".join(map(str, span.array.dims))
      size = f"{span.collective.wire_bytes / 1e6:.1f} MB ×{span.executions:g}"
      lines.append(f"{kind}: {span.collective.kind} {span.array.dtype}[{dims}] {size} in {span.where}: {state}")
  return "\n".join(lines)


class Hidden(NamedTuple):
  """A step's transfers of weights and gradients, as projected."""

  seconds: float  # how long they take
  waited: float  # the seconds of these in which compute waits
  wire_gb: float  # GB that they send
  hidden_gb: float  # GB of these that they send while the chip computes


def hidden(projection: dict[str, Any]) -> Hidden:
  """What compute hides of the transfers of a projected step."""
  found = []
  for name, seconds in projection["transfers_s"].items():
    if name.startswith(_HIDDEN) and seconds:
      waited, sent = projection["parts"].get(name, 0.0), projection["transfers_GB"][name]
      found.append((seconds, waited, sent, sent * (1 - waited / seconds)))
  return Hidden(*map(sum, zip(*found, strict=True))) if found else Hidden(0.0, 0.0, 0.0, 0.0)


def report(rows: dict[str, dict[str, Any]]) -> str:
  cells = []
  for impl, kinds in rows.items():
    if "failure" in kinds:
      cells.append((impl, kinds["failure"], *[tables.MISSING] * 5))
      continue
    for kind, row in kinds["transfers"].items():
      shares = (row["asynchronous"], row["compute_meanwhile"], row["enough_compute"])
      sizes = tables.number(row["collectives"], 0), tables.number(row["wire_GB"], 2)
      cells.append((impl, kind, *sizes, *(_share(s) for s in shares)))
  projected = {name: row["projection"] for name, row in rows.items() if "transfers_s" in row.get("projection", {})}
  seconds = []
  for name, projection in projected.items():
    of = hidden(projection)
    hidden_s = 1 - of.waited / of.seconds if of.seconds else None
    hidden_gb = of.hidden_gb / of.wire_gb if of.wire_gb else None
    figures = [f"{each:.3f}" for each in (projection["step_s"], of.seconds, of.waited)]
    seconds.append((name, *figures, _share(hidden_s), tables.number(of.wire_gb, 2), _share(hidden_gb)))
  second = [_SECONDS, tables.markdown(_SECONDS_HEADER, seconds)] if seconds else []
  return "\n\n".join([f"{_INTRODUCTION}\n{tables.markdown(_HEADER, cells)}", *second]) + "\n"


def _share(value: float | None) -> str:
  return tables.MISSING if value is None else f"{value:.0%}"


def _read(file: pathlib.Path) -> dict[str, list[spans.Span]]:
  module = hlo.parse(file.read_text(encoding="utf-8"))
  groups = _FSDP if file.stem.endswith(("none", "window")) else _STAGES
  return transfers(module, groups=groups, exclude_dim=_VOCABULARY)


def main(argv: list[str] | None = None) -> None:
  options = _parse(argv)
  console = rich_console.Console()
  json_file = options.output.with_suffix(".json")
  rows, found = tables.read(json_file), {}
  with interruption.temporary_folder() as temporary:
    options.hlo = options.hlo or pathlib.Path(temporary)
    for impl in options.impl:
      arguments = shapes.arguments(shapes.SHAPES[SHAPE], impl, {"compile_xla_flags": SPARSE_CORE_FLAGS})
      names = [SHAPE, impl]
      figures = compile_step.compile_step(
          arguments, label=", ".join(names), names=names, options=options, console=console
      )
      rows[impl] = {**figures, "arguments": arguments, "versions": compile_step.versions()}
      if "failure" not in figures:
        found[impl] = _read(compile_step.hlo_file(options.hlo, *names))
        rows[impl]["transfers"] = {kind: summary(each) for kind, each in found[impl].items()}
      tables.write(json_file, rows)
      options.output.with_suffix(".md").write_text(report(rows), encoding="utf-8")
  _print(console, found, options.details)


def _print(console: rich_console.Console, found: dict[str, dict[str, list[spans.Span]]], with_details: bool) -> None:
  for name, kinds in found.items():
    if with_details:
      console.print(f"{name}\n{details(kinds)}\n", markup=False, highlight=False, soft_wrap=True)
  rows = {name: {"transfers": {kind: summary(each) for kind, each in kinds.items()}} for name, kinds in found.items()}
  console.print(report(rows), markup=False, highlight=False, soft_wrap=True)


def _parse(argv: list[str] | None) -> argparse.Namespace:
  parser = argparse.ArgumentParser(prog="python -m benchmarks.overlap", description=__doc__.splitlines()[0])
  parser.add_argument("--details", action="store_true", help="print every collective and what runs meanwhile")
  return compile_step.parse(parser, argv, output="overlap", impl=["none", "window", "circular_bsw", "host BSW"])


if __name__ == "__main__":
  sys.exit(interruption.run(main, "overlap"))

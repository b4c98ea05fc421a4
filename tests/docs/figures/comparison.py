# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""README.md, docs/differences.md and docs/releasing.md."""

from collections.abc import Iterator

from benchmarks import first_page, shapes
from tests.docs.figures.results import (
    beside_compute,
    compiled,
    hidden,
    in_8_microbatches,
    percent,
    Step,
    table,
    wall_time,
)

_GATHERS = ("forward gathers", "backward gathers")


def _host_gathers() -> str:
  """Returns the share of host BSW's gathers that have compute to hide behind, in words if there are none."""
  share = max(beside_compute("host BSW", transfer) for transfer in _GATHERS)
  return percent(share) if share else "none"


def _step(row: first_page.Row, impl: str) -> str:
  figures = first_page.best(table("compiler_figures"), row.shape, impl)["projection"]
  at_most, wrong = "≤ " if figures["unknown"] else "", " (wrong values)" if impl == "host BSW" else ""
  return f"{at_most}{figures['step_s']:.2f} s{wrong}"


def readme() -> Iterator[str]:
  for row in first_page.ROWS:
    cells = " | ".join(_step(row, impl) for impl in row.implementations)
    yield f"| {row.title} | {cells} |"
  of_8b, of_70b = (in_8_microbatches(f"{name}-8-batches") for name in ("llama3-8b", "llama3-70b"))
  times = shapes.SHAPES["llama3-8b-8-batches"].without["gradient_accumulation_steps"]
  yield f"With `gradient_accumulation_steps={times}` they travel {times} times."
  yield f"""Llama 3 8B on 16 chips of v6e sends {of_8b[2].sent:.0f} GB instead of {of_8b[0].sent:.0f}, and takes
      {of_8b[2].seconds:.1f} s instead of {of_8b[0].seconds:.1f}, but {of_8b[2].peak:.1f} GB of memory instead of
      {of_8b[0].peak:.1f}."""
  yield f"""Llama 3 70B takes {of_70b[1].seconds:.1f} s in a window that accumulates, {of_70b[2].seconds:.1f} with 8
      microbatches, and {of_70b[0].seconds:.1f} without a window"""
  yield f"""| BSW hides {percent(hidden("host BSW"))} of the seconds of its transfers of weights and gradients (Llama 3
      8B, v6e-64) | {percent(hidden("circular_bsw"))} |"""


def differences() -> Iterator[str]:
  plain, bsw, ours = (compiled("llama3-70b", impl) for impl in ("host plain", "host BSW", "circular_bsw"))
  yield f"""| BSW takes {bsw.peak / plain.peak:.1f} × the peak memory of the plain pipeline (Llama 3 70B, 128 chips:
      {bsw.peak:.1f} GB) and sends {bsw.sent:.0f} GB per chip and step |
      {ours.peak / plain.peak:.2f} ×, {ours.peak:.1f} GB, {ours.sent:.0f} GB |"""
  of_bsw = percent(beside_compute("host BSW", "gradient reductions"))
  forward, backward, reductions = (
      percent(beside_compute("circular_bsw", transfer)) for transfer in (*_GATHERS, "gradient reductions")
  )
  yield f"""| {_host_gathers()} of BSW's weight gathers and {of_bsw} of its gradient reductions (bytes) have compute to
      hide behind (Llama 3 8B, v6e-64) | {forward} of the gathers forward, {backward} backward, {reductions} of the
      reductions; of the seconds that these take, {percent(hidden("circular_bsw"))} are hidden |"""
  yield f"""| BSW takes {wall_time("host BSW"):.2f} × the step time of the plain pipeline on virtual CPU devices |
      {wall_time("circular_bsw"):.2f} × |"""


def releasing() -> Iterator[str]:
  newest = table("newest_libtpu")

  def seconds(shape: str, impl: str) -> tuple[str, str]:
    name, figures = next((name, row) for name, row in newest[shape].items() if shapes.implementation_of(name) == impl)
    return f"{Step(figures).seconds:.2f} s", f"({compiled(shape, *name.split(', ')).seconds:.2f} s"

  (none, none_), (window, window_), (stages, stages_) = (
      seconds("llama3-70b", impl) for impl in ("none", "window", "circular_bsw")
  )
  yield f"""Llama 3 70B takes {none} without a pipeline {none_} with the constraints), {window} in the window {window_}),
      {stages} in the pipeline {stages_});"""
  (window, window_), (stages, stages_) = (seconds("mixtral-8x7b-dropless", impl) for impl in ("window", "circular_bsw"))
  yield f"Mixtral 8x7B, best flags, {window} in the window {window_}), {stages} in the pipeline {stages_})."

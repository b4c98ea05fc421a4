# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""docs/window.md and docs/batch-split.md."""

from collections.abc import Iterator

from benchmarks import published as published_benchmark
from tests.docs.figures.results import (
    ASYNC_DISPATCH,
    best,
    between,
    compiled,
    fraction,
    IN_8_MICROBATCHES,
    in_8_microbatches,
    policies,
    span,
    table,
    WITH_EXPERTS,
)


def window() -> Iterator[str]:
  for shape in IN_8_MICROBATCHES:
    steps = in_8_microbatches(shape)
    figures = [*(f"{step.sent:.0f}" for step in steps), *(f"{step.seconds:.1f}" for step in steps)]
    yield f"| `{shape}` | {' | '.join(figures)} |"
  of_8b = in_8_microbatches("llama3-8b-8-batches")
  yield f"""The window keeps the layers' inputs of all microbatches: {of_8b[2].peak:.1f} GB at the peak instead of
      {of_8b[0].peak:.1f} for Llama 3 8B."""
  for title, step in (
      ("`none`, `gradient_accumulation_steps=2`", compiled("llama3-8b-2-slices", "none")),
      ("`window`, `num_pipeline_microbatches=2`", compiled("llama3-8b-2-slices", "window")),
      ("`none`, attention kept, best flags", best("llama3-8b-2-slices", "none")),
      ("`window`, the same", best("llama3-8b-2-slices", "window")),
  ):
    yield f"| {title} | {step.sent:.0f} | {step.between_slices:.2f} | {step.peak:.1f} | {step.seconds:.2f} |"
  gains = [1 - compiled(shape, "window").seconds / compiled(shape, "none").seconds for shape in WITH_EXPERTS]
  yield f"Models with experts gain {span(gains)} % of a step with MaxText's default dispatch"
  none, window_ = (best("mixtral-8x7b", impl) for impl in ("none", "window"))
  yield f"""With a capacity and dense dispatch (`--shape mixtral-8x7b`) it is {window_.seconds:.2f} s instead of
      {none.seconds:.2f}, each with its best policy."""
  none, window_ = (compiled("llama3-70b", impl) for impl in ("none", "window"))
  yield f"""With one microbatch the window sends {fraction(1 - window_.sent / none.sent)} less: {window_.sent:.0f} GB
      instead of {none.sent:.0f}."""
  kept = lambda impl: best("llama3-70b", impl).seconds
  yield f"""With queries, keys, values, the context and one product of the MLP kept (`--keep`), the same step takes
      {kept("window"):.2f} s in the window, {kept("none"):.2f} s without it, and {kept("circular_bsw"):.2f} s in four
      stages"""
  of_70b, of_8b = policies("llama3-70b"), policies("llama3-8b")
  peaks = between(of_70b.peaks + of_8b.peaks)
  yield f"""Under MaxText's other policies, with one sequence, the window takes {between(of_70b.steps)} times as long as
      none, and for Llama 3 8B on v6e-16 {between(of_8b.steps)} times. Peaks are {peaks} times as high"""
  rows = table("published")["llama3.1-70b-v6e-32"]
  step = {impl: published_benchmark.fastest(rows, impl) for impl in ("circular", "none", "window")}
  of = {impl: f"{row['projection']['step_s']:.2f} s" for impl, row in step.items()}
  yield f"""Llama 3.1 70B on v6e-32 takes {of['circular']} with `circular`, {of['none']} without a window, and
      {of['window']} with `circular_bsw`."""


def batch_split() -> Iterator[str]:
  shapes = ("deepseek3-671b-batch-split", "deepseek3-671b")
  split, whole = (compiled(shape, "circular_bsw") for shape in shapes)
  split_beside, whole_beside = (compiled(shape, "circular_bsw", ASYNC_DISPATCH) for shape in shapes)
  yield f"""
      | peak memory | {split.peak:.1f} GB | {whole.peak:.1f} GB |
      | temporary memory | {split.temp:.1f} GB | {whole.temp:.1f} GB |
      | sent in a step | {split.sent:.0f} GB | {whole.sent:.0f} GB |
      | a step, projected | {split.seconds:.1f} s | {whole.seconds:.1f} s |
      | of which layers wait for the dispatch | {split.dispatch:.1f} s | {whole.dispatch:.1f} s |
      | a step with `--flags {ASYNC_DISPATCH}` | {split_beside.seconds:.1f} s | {whole_beside.seconds:.1f} s |
      | of which layers wait for the dispatch | {split_beside.dispatch:.1f} s | {whole_beside.dispatch:.1f} s |"""
  yield f"""Layers without the schedule gain, too, but need more memory: {whole_beside.peak:.1f} GB, and
      {split_beside.peak:.1f} GB with it."""

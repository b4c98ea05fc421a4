# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""docs/choosing.md. What its commands estimate is computed again; what they compiled stands here."""

from collections.abc import Iterator
import functools
import pathlib
from typing import Any, NamedTuple

import maxtext
import yaml

from benchmarks import shapes
from maxtext_pp_ext.hardware import chips
from maxtext_pp_ext.plan import search
from tests.docs.figures.results import (
    ASYNC_DISPATCH,
    best,
    compiled,
    fastest,
    fraction,
    held_back,
    overlapping,
    percent,
    plan_errors,
    SPARSECORES,
    VMEM,
    WITH_EXPERTS,
    within,
)

MODELS = pathlib.Path(maxtext.__path__[0]) / "configs" / "models"
_ONE_SLICE = ("model_name=llama3-70b", "compile_topology=v5p-256", "per_device_batch_size=2", "max_target_length=4096")
_SLICES = ("model_name=llama3-8b", "compile_topology=v6e-8", "compile_topology_num_slices=8", "max_target_length=2048")
_FULL = "remat_policy=full"
_IMPLEMENTATIONS = ("none", "circular_bsw", "circular")
_TITLES = {
    "mixtral-8x7b-dropless": "Mixtral 8x7B, 32 chips",
    "llama4-17b-16e": "Llama 4 Scout, 64 chips",
    "gpt-oss-120b": "gpt-oss-120b, 64 chips",
    "qwen3-235b-a22b": "Qwen3 235B-A22B, 128 chips",
    "deepseek3-671b-4096": "DeepSeek-V3 671B, 512 chips",
}


class _Compiled(NamedTuple):
  peak: float
  sent: float
  between_slices: float
  seconds: float


# Llama 3 8B on 8 slices of v6e-8 without a pipeline, as `--validate` compiles it: GB and seconds.
_WITHOUT = _Compiled(19.4, 42.3, 3.6, 1.12)


@functools.cache
def _plan(*argv: str, chip: chips.Chip | None = None) -> Any:
  import maxtext_pp_ext  # pylint: disable=import-outside-toplevel

  maxtext_pp_ext.install()
  from maxtext_pp_ext.plan import search  # pylint: disable=import-outside-toplevel

  return search.plan(argv, implementations=_IMPLEMENTATIONS, chip=chip)


def _first(found: Any, impl: str, stages: int = 1) -> Any:
  """Returns the best candidate of an implementation with a number of stages."""
  of = lambda candidate: candidate.schedule.stages if candidate.schedule else 1
  return next(each for each in found.candidates if (each.impl, of(each)) == (impl, stages) and found.fits(each))


def choosing() -> Iterator[str]:
  yield from _one_slice()
  yield from _where_it_pays()
  yield from _flags()
  yield from _experts()
  yield from _if_nothing_fits()
  yield from _trust()


def _one_slice() -> Iterator[str]:
  found = _plan(*_ONE_SLICE, _FULL)
  window, none, stages = (_first(found, *which) for which in (("circular_bsw",), ("none",), ("circular_bsw", 4)))
  yield f"each row keeps what makes it fastest within {percent(search.NEARLY_FULL)} of the memory"
  yield f"""It sends {fraction(1 - window.costs.sent / none.costs.sent)} less than `none`. Four stages
      send {fraction(stages.costs.sent / window.costs.sent)} of what the window sends, but add bubbles, sums of gradients,
      and copies of chunks."""


def _by_stages() -> dict[int, _Compiled]:
  eight = compiled("llama3-8b-8-slices", "circular_bsw")
  return {8: _Compiled(eight.peak, eight.sent, eight.between_slices, eight.seconds), 1: _WITHOUT}


def _estimated(stages: int) -> Any:
  found = _plan(*_SLICES, _FULL, "per_device_batch_size=1")
  return _first(found, "circular_bsw" if stages > 1 else "none", stages)


def _where_it_pays() -> Iterator[str]:
  eight, none = (_by_stages()[stages] for stages in (8, 1))
  yield f"""Compiled (`python -m benchmarks.compiler_figures --shape llama3-8b-8-slices`), eight stages need
      {eight.peak:.1f} GB and send {eight.sent:.1f} GB, of which {eight.between_slices:.1f} GB go between slices. Without
      a pipeline the program needs {none.peak} GB and sends {none.sent} GB, of which {none.between_slices} GB go between
      slices."""
  yield f"""A step projected from these programs takes at most {eight.seconds:.2f} s with eight stages, and
      {none.seconds} without a pipeline."""
  ours, without = (best("llama3-8b-8-slices", impl).seconds for impl in ("circular_bsw", "none"))
  yield f"""With collectives on the SparseCores and activations kept (`--keep`) a step takes at most {ours:.2f} s
      with eight stages, and {without:.2f} without a pipeline."""
  at_once, delayed = (best(f"llama3-8b-4-slices{delay}", "circular_bsw").seconds for delay in ("", "-delayed"))
  without, window = (best("llama3-8b-4-slices", impl).seconds for impl in ("none", "window"))
  yield f"""On 4 slices of v6e-16 with two sequences of 4096 (`--shape llama3-8b-4-slices`) no pipeline takes
      {without:.2f} s, the window {window:.2f}, and four stages at most {delayed:.2f}, with delayed forwarding."""
  yield f"""It is for stages over a slow network with many repeats: {delayed:.2f} s instead of {at_once:.2f} (`--keep
      --shape llama3-8b-4-slices-delayed`, and without `-delayed`)."""


def _if_nothing_fits() -> Iterator[str]:
  from maxtext_pp_ext.cli.tables import plan as table  # pylint: disable=import-outside-toplevel

  found = _plan("model_name=llama3-70b", "per_device_batch_size=4", "compile_topology=v6e-16")
  missing = dict(zip(("device", "host"), found.missing(found.candidates[0].costs), strict=True))
  result = {"remedies": found.remedies, "device_memory": found.memory_limit, "candidates": [{"missing": missing}]}
  yield "\n".join(table._remedies(result, found))


def _flags() -> Iterator[str]:
  ways = ("none", "window", "circular_bsw")
  in_turn = lambda steps: " | ".join(f"{step.seconds:.2f} s" for step in steps)
  of_70b = {flags: [compiled("llama3-70b", impl, *flags) for impl in ways] for flags in ((), (VMEM,), SPARSECORES)}
  yield f"""
      | default | {in_turn(of_70b[()])} |
      | {VMEM} | {in_turn(of_70b[(VMEM,)])} |
      | and {SPARSECORES[1]}, without `xla_sc_disjoint_spmem` | {in_turn(of_70b[SPARSECORES])} |"""
  yield f"""
      | default | {in_turn(compiled("llama3-8b-v6e", impl) for impl in ways)} |
      | collectives on the SparseCores | {in_turn(overlapping(impl) for impl in ways)} |"""
  longer = [
      compiled("llama3-70b", impl, VMEM).compile_seconds / compiled("llama3-70b", impl).compile_seconds for impl in ways
  ]
  yield f"Compiling takes {min(longer):.1f} to {max(longer):.1f} times as long."
  queued, others = best("llama3-70b", "window"), compiled("llama3-70b", "window", shapes.KEEPS, *SPARSECORES)
  yield f"""Llama 3 70B's window with activations kept takes {queued.seconds:.2f} s instead of {others.seconds:.2f}."""


def _experts() -> Iterator[str]:
  ways = ("none", "window", "circular_bsw")
  steps = {shape: [compiled(shape, impl) for impl in ways] for shape in WITH_EXPERTS}
  for shape in WITH_EXPERTS:
    cells = " | ".join(f"{step.seconds:.2f} s, {step.peak:.1f} GB" for step in steps[shape])
    yield f"| {_TITLES[shape]}, `{shape}` | {cells} |"
  [(shape, less)] = [
      (shape, window.seconds - ours.seconds)
      for shape, (_, window, ours) in steps.items()
      if window.seconds > ours.seconds
  ]
  yield f"""Begin with the window: it is the fastest in each row except {_TITLES[shape].split()[0]}'s, where the pipeline
      takes {less:.2f} s less."""
  mixtral = yaml.safe_load((MODELS / "mixtral-8x7b.yml").read_text("utf-8"))
  yield f"""It is at most the number of experts divided by `num_experts_per_tok`:
      {mixtral["num_experts"] // mixtral["num_experts_per_tok"]} times for Mixtral."""
  of_mixtral, of_qwen3 = (compiled(shape, "host BSW").seconds for shape in ("mixtral-8x7b-dropless", "qwen3-235b-a22b"))
  yield f"""Of MaxText's own pipelines only BSW compiles, which computes wrong values: Mixtral {of_mixtral:.2f} s, Qwen3
      {of_qwen3:.2f} s."""
  none, _, ours = steps["gpt-oss-120b"]
  yield f"gpt-oss needs {fraction(ours.peak / none.peak)} of the memory."
  mixtral = [fastest("mixtral-8x7b-dropless", impl, ASYNC_DISPATCH) for impl in ways]
  yield f"""Mixtral then takes {mixtral[0].seconds:.2f} s without a pipeline, {mixtral[1].seconds:.2f} s in a window and
      {mixtral[2].seconds:.2f} s in the pipeline."""
  seconds = lambda shape: ", ".join(f"{fastest(shape, impl, ASYNC_DISPATCH, keeps=True).seconds:.2f}" for impl in ways)
  names = zip(("Mixtral", "Scout", "gpt-oss", "Qwen3", "DeepSeek-V3"), WITH_EXPERTS, strict=True)
  kept = "; ".join(f"{name} {seconds(shape)}" for name, shape in names)
  yield f"""With activations kept, too (`--keep`), and each with the best flags that were tried, seconds in the same
      order: {kept}."""
  long = compiled("deepseek3-671b-4-sequences", "window")
  yield f"fits 256 chips of v5p (`--shape deepseek3-671b-4-sequences`, {long.seconds:.1f} s)."
  errors = plan_errors()
  of = lambda figure: within(errors[shape, impl][figure] for shape in WITH_EXPERTS for impl in ways)
  yield f"""`plan` estimates memory within {of("peak_GB")} and bytes within {of("wire_total_GB")} of the compiler's in
      every
      row above"""


def _trust() -> Iterator[str]:
  errors = plan_errors()
  kept = ("circular_bsw", "circular_ag_once")
  dense = lambda shape: shape.startswith(("llama3", "stages="))

  def of(figure: str, ours: tuple[str, ...], but: str = "") -> list[float]:
    rows = [row for row in errors if dense(row[0]) and shapes.implementation_of(row[1]) in ours and row[0] != but]
    return [errors[row][figure] for row in rows if figure in errors[row]]

  v6e = max(errors["llama3-8b-v6e", impl]["peak_GB"] for impl in kept)
  experts = lambda figure: within(
      found[figure] for (shape, _), found in errors.items() if not dense(shape) and figure in found
  )
  at_use = ("circular", "none")
  above = percent(_estimated(1).costs.sent / 1e9 / _by_stages()[1].sent - 1)
  yield f"has predicted and compiled figures of {len(errors)} steps:"
  average, most, programs = held_back("Seconds")
  of_memory, most_of_memory, _ = held_back("Memory")
  of_read, most_of_read, _ = held_back("Seconds", read=True)
  yield f"""has {programs} steps of models whose programs nobody has read for `plan`. Memory is {of_memory} off on average
      and {most_of_memory} at most. Seconds are {average} off on average, and {most} at most; of models that were read,
      {of_read} and {most_of_read}."""
  yield f"""
      | dense models, `circular_bsw` and `circular_ag_once` | within {within(of("peak_GB", kept, "llama3-8b-v6e"))}, on
      v6e-64 up to {percent(v6e)} too much | within {within(of("wire_total_GB", kept))} |
      | dense models, `circular` and `none` | within {within(of("peak_GB", at_use))} | within
      {within(of("wire_total_GB", at_use))}: the compiler chooses how to gather (over slices {above}) |
      | models with experts | within {experts("peak_GB")} | within {experts("wire_total_GB")} |"""
  yield f"rows that need more than {percent(search.NEARLY_FULL)} of a device."

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""docs/seconds.md."""

from collections.abc import Iterator

from maxtext_pp_ext.hardware import chips
from maxtext_pp_ext.plan import estimate
from tests.docs.figures.results import (
    fraction,
    percent,
    plan_errors,
    published,
    published_benchmark,
    span,
    within,
)
from tests.plan import test_against_compiler

_WORDS = {4: "four", 5: "five", 6: "six", 7: "seven", 8: "eight", 9: "nine", 10: "ten"}


def seconds() -> Iterator[str]:
  v6e = chips.CHIPS["v6e"]
  yield f"at the rate that somebody measured (v6e: {(v6e.network_measured or 0) / 1e9:.2f} GB/s for a chip)"
  yield from _published()
  yield from _estimates()


def _published() -> Iterator[str]:
  errors = published()
  near = sum(abs(error) <= 0.1 for error in errors.values())
  compiled_runs, near_runs = (_WORDS.get(count, str(count)) for count in (len(errors), near))
  yield f"""{compiled_runs.capitalize()} of its {len(published_benchmark.runs())} runs have been compiled"""
  yield f"All are within {within(errors.values())}, {near_runs} within 10 %, and most projections are too long."
  tensor = [error for name, error in errors.items() if name.startswith(("default-", "gpt3-175b-int8"))]
  yield f"- Tensor parallelism (default-…, gpt3-175b-int8-v5p-1024): {span(tensor)} % too long."
  dense = "mixtral-8x7b-full-remat-v6e-256"
  yield f"- Mixtral with dense dispatch on v6e: {percent(errors[dense])} too long."
  shorter, longer = -errors["deepseek2-16b-v5p-8"], errors["mixtral-8x7b-v5p-256"]
  yield f"- Experts with Megablox on v5p: {percent(shorter)} too short and {percent(longer)} too long."
  yield f"- Llama 3.1 70B on tpu7x: {percent(-errors['llama3.1-70b-tpu7x-128'])} too short"


def _estimates() -> Iterator[str]:
  vmem = estimate._LARGE_VMEM_KIB // 1024
  v5e, v5p, v6e = (chips.CHIPS[name] for name in ("v5e", "v5p", "v6e"))
  yield f"""They take {v5e.over_peak} times as long as at the peak on v5e, {v5p.over_peak} times on v5p and
      {v6e.over_peak} times on v6e, and at least what their bytes take. With {vmem} MiB of scoped VMEM or more
      (`--xla_tpu_scoped_vmem_limit_kib` in `compile_xla_flags`) they take as long as at the peak, on v6e
      {v6e.over_peak_with_vmem} times, and {fraction(v5p.bytes_not_hidden)} of the time of their bytes is added, on v6e
      {percent(v6e.bytes_not_hidden)}"""
  assert v5e.over_peak_with_vmem == v5p.over_peak_with_vmem == 1.0 and v5e.bytes_not_hidden == v5p.bytes_not_hidden
  yield f"""of gathers within a slice of v5e {percent(estimate._AHEAD)}, in MaxText's own loop
      {percent(estimate._AHEAD_IN_OWN_LOOP)}"""
  errors = {row: found["step_s"] for row, found in plan_errors().items() if "step_s" in found}
  average = sum(map(abs, errors.values())) / len(errors) * 100
  yield f"""Over the former's rows estimates are {average:.1f} % off the projections on average, and
      {within(errors.values())} at most."""
  tie = percent(test_against_compiler.TIE)
  yield f"""Where projections of one shape with the same flags differ by more than {tie}, the estimates have the same
      order, or differ by less than {tie}"""

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""What a step computes under MaxText's remat policies, without a pipeline and with the window.

  python -m benchmarks.policies                                        every shape and policy that has no result yet
  python -m benchmarks.policies --shape llama3-8b --policy minimal     one of them, again

A window (docs/window.md) should compute what MaxText's scan over the layers computes, whatever is kept. Both are compiled
with the same flags, and a step is projected. Needs the extra `tools` (libtpu); a compilation takes one to four minutes
of two cores, and more where activations go to the host's memory. Results are kept in
`results/policies.{json,md}` after each, so a command that was ended goes on where it was.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from typing import Any

from rich import console as rich_console

from benchmarks import compile_step, shapes, tables
from maxtext_pp_ext.compiled import flags
from maxtext_pp_ext.processes import interruption

_IMPLEMENTATIONS = ("none", "window")
# More memory for products, all-gathers and reductions on the SparseCores: the best sets without a window, by
# `benchmarks.compiler_figures --shape llama3-70b --impl none --keep --flags best`.
_SETS = ("DENSE_VMEM_LIMIT_FLAG", "ENABLE_SPARSECORE_OFFLOADING_FOR_RS_AG_AR")
# On v6e the compiler else gathers within products where there is no window, which doubles their time.
_MORE_SETS = {"llama3-8b": ("DISABLE_COLLECTIVE_MATMUL",)}
_LACKING = ("xla_sc_disjoint_spmem",)  # of these sets; libtpu 0.0.48.1 has no such flag
# Sequences per device with which every policy fits.
SHAPES = {
    "llama3-70b": shapes.Shape(
        title="Llama 3 70B, v5p-256 (128 chips), FSDP 128, one sequence of 4096 per chip",
        keys={
            "model_name": "llama3-70b",
            "compile_topology": "v5p-256",
            "ici_fsdp_parallelism": 128,
            "per_device_batch_size": 1,
            "max_target_length": 4096,
        },
    ),
    "llama3-8b": shapes.Shape(
        title="Llama 3 8B, v6e-16, FSDP 16, two sequences of 2048 per chip",
        keys={
            "model_name": "llama3-8b",
            "compile_topology": "v6e-16",
            "ici_fsdp_parallelism": 16,
            "per_device_batch_size": 2,
            "max_target_length": 2048,
        },
    ),
}
CUSTOM = "custom"
POLICIES = (
    *("full", "save_out_proj", "save_qkv_proj", "save_dot_except_mlp", "save_dot_with_context_except_mlp"),
    *("save_dot_except_mlpwi", "minimal", "minimal_with_context", CUSTOM, "qkv_proj_offloaded", "minimal_offloaded"),
)
_HEADER = ("remat policy", "step s", "with the window", "compute s", "with the window", "peak GB", "with the window")
_INTRODUCTION = f"""# Remat policies

`python -m benchmarks.policies` printed this: projected seconds of a step (docs/seconds.md) and memory per chip, without \
a pipeline and with the window (docs/window.md), under each of MaxText's policies. Compute is products, kernels and \
all else that a step computes; the rest of a step waits for transfers. In parentheses the ratio to the step without a \
pipeline. Both have the same flags.

custom keeps {", ".join(key for key, place in shapes.SHAPES["llama3-70b"].kept.items() if place == "device")} on the \
device. Where activations go to the host's memory, the compiler does not report the peak of the device's.
"""
Results = dict[str, dict[str, dict[str, dict[str, Any]]]]  # figures by shape, policy and implementation


def main(argv: list[str] | None = None) -> None:
  options = _parse(argv)
  console, json_file = rich_console.Console(), options.output.with_suffix(".json")
  results: Results = tables.read(json_file)
  chosen = bool(options.policy)
  for name in options.shape or SHAPES:
    for policy in options.policy or POLICIES:
      for impl in options.impl:
        rows = results.setdefault(name, {}).setdefault(policy, {})
        given = arguments(name, policy, impl)
        if not chosen and rows.get(impl, {}).get("arguments") == given:
          continue
        figures = compile_step.compile_step(
            given,
            label=f"{name}, {policy}, {impl}",
            names=[name, policy, impl],
            options=options,
            console=console,
        )
        rows[impl] = {**figures, "arguments": given, "versions": compile_step.versions()}
        tables.write(json_file, results)
        options.output.with_suffix(".md").write_text(report(results), encoding="utf-8")
  console.print(report(results), markup=False, highlight=False, soft_wrap=True)


def arguments(name: str, policy: str, impl: str) -> list[str]:
  """MaxText's command-line arguments for a shape, a policy and an implementation."""
  kept = shapes.SHAPES["llama3-70b"].kept if policy == CUSTOM else {"remat_policy": policy}
  return shapes.arguments(SHAPES[name], impl, {**kept, flags.KEY: flags.joined("", _sets(name), _LACKING)})


def _sets(name: str) -> tuple[str, ...]:
  return (*_SETS, *_MORE_SETS.get(name, ()))


def report(results: Results) -> str:
  """The Markdown file: a table for each shape, and what the ratios are at most and on average."""
  parts = [_INTRODUCTION]
  for name in (name for name in SHAPES if name in results):
    pairs = {policy: results[name][policy] for policy in POLICIES if _is_pair(results[name].get(policy, {}))}
    table = tables.markdown(_HEADER, [_row(policy, *_of(pair)) for policy, pair in pairs.items()])
    parts += [f"## {SHAPES[name].title}\n", table]
    ratios = {policy: ratio(*_of(pair)) for policy, pair in pairs.items()}
    if ratios:
      most = max(ratios, key=lambda policy: ratios[policy])
      parts.append(
          f"\nThe window computes for {statistics.mean(ratios.values()):.3f} times the seconds of none on average, and "
          f"{ratios[most]:.3f} times at most ({most})."
      )
    failed = [
        f"- {policy}, {impl}: {row['failure']}"
        for policy, rows in results[name].items()
        for impl, row in rows.items()
        if "failure" in row
    ]
    parts += [f"\nNot computed:\n\n{'\n'.join(failed)}"] if failed else []
    keys = " ".join(f"{key}={value}" for key, value in SHAPES[name].keys.items())
    of_flags = f"{', '.join(_sets(name))}, without {', '.join(_LACKING)}"
    parts.append(f"\nMaxText's keys: `{keys}`. Sets of flags: {of_flags}.\n")
  return "\n".join(parts)


def compute(row: dict[str, Any]) -> float:
  """Projected seconds in which a device computes."""
  return row["projection"]["compute_s"]


def ratio(none: dict[str, Any], window: dict[str, Any]) -> float:
  """The seconds in which a window computes, in parts of those without it."""
  return compute(window) / compute(none)


def _is_pair(rows: dict[str, dict[str, Any]]) -> bool:
  return all("projection" in rows.get(impl, {}) for impl in _IMPLEMENTATIONS)


def _of(pair: dict[str, dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
  none, window = (pair[impl] for impl in _IMPLEMENTATIONS)
  return none, window


def _row(policy: str, none: dict[str, Any], window: dict[str, Any]) -> tuple[str, ...]:
  steps = [row["projection"]["step_s"] for row in (none, window)]
  peaks = [row["peak_GB"] for row in (none, window)]
  return (
      policy,
      *(tables.number(steps[0], 3), tables.with_ratio(steps[1], steps[0], 3)),
      *(tables.number(compute(none), 3), f"{compute(window):.3f} ({ratio(none, window):.3f}×)"),
      *(tables.number(peaks[0]), tables.with_ratio(peaks[1], peaks[0])),
  )


def _parse(argv: list[str] | None) -> argparse.Namespace:
  parser = argparse.ArgumentParser(prog="python -m benchmarks.policies", description=__doc__.splitlines()[0])
  parser.add_argument("--shape", nargs="+", choices=sorted(SHAPES), metavar="NAME")
  parser.add_argument("--policy", nargs="+", choices=POLICIES, metavar="NAME", help="these, also if they have a result")
  return compile_step.parse(parser, argv, output="policies", impl=[*_IMPLEMENTATIONS], minutes=60.0)


if __name__ == "__main__":
  sys.exit(interruption.run(main, "policies"))

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""What `maxtext-pp plan` predicts of models that plan_error.md lacks, beside the TPU compiler's figures.

  python -m benchmarks.held_back                      every program that has no result yet
  python -m benchmarks.held_back --at-most 0          the report alone
  python -m benchmarks.held_back --model gemma3-12b   those of a model, again

Each model is compiled with five remat policies, without a pipeline, with the window, or with a pipeline, in turn. Needs
the extra `tools` (libtpu); a compilation takes one to four minutes of two cores. Results are kept in
`results/held_back.{json,md}` after each, so a command that was ended goes on where it was.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
import statistics
import sys
from typing import Any, NamedTuple

from rich import console as rich_console

from benchmarks import compile_step, plan_error, shapes, tables
from maxtext_pp_ext.compiled import flags
from maxtext_pp_ext.processes import interruption

# Sets of XLA flags for a chip, and flags of these that libtpu 0.0.48.1 lacks: more memory for products, and transfers on
# the SparseCores where there are any.
_TO_SPARSECORES, _LACKING = "ENABLE_SPARSECORE_OFFLOADING_FOR_RS_AG_AR", ("xla_sc_disjoint_spmem",)
SETS: dict[str, tuple[Sequence[str], Sequence[str]]] = {
    "v5e": (["DENSE_VMEM_LIMIT_FLAG"], ()),
    "v5p": (["DENSE_VMEM_LIMIT_FLAG", _TO_SPARSECORES], _LACKING),
    "v6e": (["DENSE_VMEM_LIMIT_FLAG", _TO_SPARSECORES, "DISABLE_COLLECTIVE_MATMUL"], _LACKING),
}


def _shape(model: str, topology: str, batch: int, length: int, stages: int, **keys: int) -> shapes.Shape:
  """A shape whose microbatches have one row for each device of a stage; FSDP takes the devices that are left."""
  sizes = {"per_device_batch_size": batch, "max_target_length": length, "num_pipeline_microbatches": batch * stages}
  axes = {"ici_pipeline_parallelism": stages, "ici_fsdp_parallelism": -1, "allow_split_physical_axes": True}
  return shapes.Shape(title=model, keys={"model_name": model, "compile_topology": topology, **sizes, **axes, **keys})


# Dense layers, layers with experts, latent attention, cycles of layers; no model of compiler_figures or policies.
MODELS = {
    "qwen3-8b": _shape("qwen3-8b", "v6e-16", 2, 2048, 4),
    "qwen2.5-7b": _shape("qwen2.5-7b", "v5e-32", 1, 2048, 4),
    "deepseek2-16b": _shape("deepseek2-16b", "v5p-32", 2, 4096, 2, ici_expert_parallelism=4),
    "mistral-7b": _shape("mistral-7b", "v6e-8", 2, 2048, 2),
    "llama2-7b": _shape("llama2-7b", "v5e-32", 1, 4096, 4),
    "llama2-13b": _shape("llama2-13b", "v5p-32", 2, 4096, 4),
    "gpt-oss-20b": _shape("gpt-oss-20b", "v6e-32", 1, 2048, 2, num_layers_per_pipeline_stage=2, ici_expert_parallelism=4),
    "olmo3-7b": _shape("olmo3-7b", "v5e-32", 1, 4096, 2, num_layers_per_pipeline_stage=4),
    "qwen3-14b": _shape("qwen3-14b", "v5p-32", 4, 2048, 2),
    "gemma3-12b": _shape("gemma3-12b", "v6e-32", 1, 2048, 2, num_layers_per_pipeline_stage=6),
    "qwen3-4b": _shape("qwen3-4b", "v5e-16", 2, 2048, 4),
    "qwen3-30b-a3b": _shape("qwen3-30b-a3b", "v5p-64", 1, 4096, 4, ici_expert_parallelism=4),
    "qwen3-32b": _shape("qwen3-32b", "v6e-128", 1, 2048, 4),
    "qwen2.5-14b": _shape("qwen2.5-14b", "v5e-64", 1, 2048, 4),
    "mixtral-8x22b": _shape("mixtral-8x22b", "v5p-128", 1, 2048, 4, ici_expert_parallelism=4),
    "olmo3-32b": _shape("olmo3-32b", "v5p-64", 1, 4096, 4, num_layers_per_pipeline_stage=4),
    "deepseek2-236b": _shape(
        "deepseek2-236b", "v5p-512", 1, 2048, 4, ici_expert_parallelism=4, pipeline_parallel_layers=56
    ),
    "gemma-7b": _shape("gemma-7b", "v6e-16", 1, 4096, 4),
    "qwen3-1.7b": _shape("qwen3-1.7b", "v5e-8", 4, 2048, 2),
    "gemma2-9b": _shape("gemma2-9b", "v5p-16", 2, 4096, 4, pipeline_parallel_layers=20),
    "gemma2-2b": _shape("gemma2-2b", "v5e-16", 2, 2048, 2, pipeline_parallel_layers=12),
    "gemma3-4b": _shape("gemma3-4b", "v6e-16", 2, 2048, 2, num_layers_per_pipeline_stage=6, pipeline_parallel_layers=24),
    "qwen2.5-1.5b": _shape("qwen2.5-1.5b", "v5e-8", 4, 2048, 2),
    "qwen3-0.6b": _shape("qwen3-0.6b", "v6e-8", 4, 2048, 2),
    "gemma-2b": _shape("gemma-2b", "v5p-16", 4, 2048, 2),
    "gemma2-27b": _shape("gemma2-27b", "v5p-32", 1, 4096, 4, pipeline_parallel_layers=20),
}
# Programs of these were read for something that plan uses: how XLA copies weights (qwen3-8b, qwen2.5-7b), what much VMEM
# hides (qwen3-8b), collective matmuls on v5e (qwen2.5-7b, llama2-7b, qwen3-4b, gemma2-2b), gathers in MaxText's loop
# (mistral-7b), experts' kernels (deepseek2-16b), how tokens are padded (gpt-oss-20b), chunks of weights and what
# collective matmuls hold (gemma3-12b), decoder layers that are two (gemma2-9b), gathers in steps (qwen3-32b), layers
# outside of loops (gemma3-4b), what backward of the logits holds (qwen2.5-1.5b), what v5e gathers beside compute
# (qwen2.5-14b), norms of what products compute (qwen3-4b). The others were read for nothing, but to see whether what was
# found in one holds in them.
READ: tuple[str, ...] = ("qwen3-8b", "qwen2.5-7b", "llama2-7b", "mistral-7b", "deepseek2-16b", "gpt-oss-20b", "qwen3-4b")
READ += ("gemma3-12b", "gemma2-9b", "gemma2-2b", "qwen3-32b", "gemma3-4b", "qwen2.5-1.5b", "qwen2.5-14b")
# Without XLA flags: each second model of v6e, and most of v5p and v5e. With one on v5e the window takes 20 minutes to
# compile.
_PLAIN: tuple[str, ...] = ("qwen2.5-7b", "deepseek2-16b", "mistral-7b", "olmo3-7b", "qwen3-14b", "gemma3-12b", "qwen3-4b")
_PLAIN += ("qwen2.5-14b", "mixtral-8x22b", "olmo3-32b", "deepseek2-236b", "gemma-7b", "qwen3-1.7b", "gemma2-9b")
_PLAIN += ("gemma2-2b", "gemma3-4b", "qwen2.5-1.5b", "qwen3-0.6b", "gemma-2b", "gemma2-27b")
CUSTOM = "context, mlpwi_0"
_KEPT: dict[str, dict[str, object]] = {
    CUSTOM: {"remat_policy": "custom", "context": "device", "mlpwi_0": "device"},
}
POLICIES = ("full", "save_qkv_proj", "minimal_with_context", CUSTOM, "qkv_proj_offloaded")
_IMPLEMENTATIONS = ("none", "window", "circular_bsw")
_INTRODUCTION = """# Closed forms against the compiler, on steps held back

`python -m benchmarks.held_back` printed this: what `maxtext-pp plan` predicts of models that \
[plan_error.md](plan_error.md) lacks, per chip and step, beside the TPU compiler's figures. Columns are those of that \
table. What a policy offloads makes the compiler report no peak.
"""
Results = dict[str, dict[str, dict[str, Any]]]  # figures by model and name of a program


class Program(NamedTuple):
  """A step to compile."""

  model: str
  policy: str
  impl: str

  @property
  def name(self) -> str:
    return f"{self.policy}, {self.impl}"

  def arguments(self) -> list[str]:
    """MaxText's command-line arguments."""
    shape = MODELS[self.model]
    chip, _, _ = str(shape.keys["compile_topology"]).partition("-")
    of_flags = {} if self.model in _PLAIN else {flags.KEY: flags.joined("", *SETS[chip])}
    return shapes.arguments(shape, self.impl, _KEPT.get(self.policy, {"remat_policy": self.policy}) | of_flags)


def programs(models: Sequence[str] = tuple(MODELS)) -> Iterator[Program]:
  """Each policy of these models, with an implementation in turn."""
  for i, model in enumerate(MODELS):
    for j, policy in enumerate(POLICIES):
      if model in models:
        yield Program(model, policy, _IMPLEMENTATIONS[(i + j) % len(_IMPLEMENTATIONS)])


def main(argv: list[str] | None = None) -> None:
  options = _parse(argv)
  console, json_file = rich_console.Console(), options.output.with_suffix(".json")
  results: Results = tables.read(json_file)
  again, left = bool(options.model), options.at_most
  for program in programs(options.model or tuple(MODELS)):
    rows, given = results.setdefault(program.model, {}), program.arguments()
    if program.impl not in options.impl or (not again and rows.get(program.name, {}).get("arguments") == given):
      continue
    if left == 0:
      break
    left -= 1
    found = compile_step.compile_step(
        given,
        label=f"{program.model}, {program.name}",
        names=program,
        options=options,
        console=console,
    )
    rows[program.name] = {**found, "arguments": given, "versions": compile_step.versions()}
    tables.write(json_file, results)
  text = report(results)
  options.output.with_suffix(".md").write_text(text, encoding="utf-8")
  console.print(text, markup=False, highlight=False, soft_wrap=True)


def report(results: Results) -> str:
  """The Markdown file: the table of plan_error, and how far off the predictions are together."""
  cases = [
      plan_error.Case(model, name, figures["arguments"], figures)
      for model, rows in results.items()
      for name, figures in rows.items()
      if "failure" not in figures
  ]
  rows = [(case, plan_error.predicted(case)) for case in cases]
  refused = [
      f"- {model}, {name}: {figures['failure']}"
      for model, each in results.items()
      for name, figures in each.items()
      if "failure" in figures
  ]
  parts = [plan_error.report(rows, _INTRODUCTION)]
  if unread := [row for row in rows if row[0].title not in READ]:
    parts.append(f"Models whose programs nobody has read for plan: {summary(*errors(unread))}")
  if read := [row for row in rows if row[0].title in READ]:
    parts.append(f"{', '.join(READ)}, whose programs were read for something: {summary(*errors(read))}")
  parts += [f"{each}\n" for each in tables.scaled((f"{case.title}, {case.impl}", case.figures) for case in cases)]
  parts += [f"Not computed:\n\n{'\n'.join(refused)}\n"] if refused else []
  return "\n".join(parts)


def errors(rows: Sequence[tuple[plan_error.Case, Any]]) -> tuple[list[float], list[float]]:
  """How far off the predictions are, relative to the compiler's: peak memory, and seconds."""
  memory = [costs.peak / 1e9 / case.figures["peak_GB"] - 1 for case, (costs, _) in rows if case.figures["peak_GB"]]
  return memory, [estimate.seconds / case.projected - 1 for case, (_, estimate) in rows if case.projected]


def summary(memory: Sequence[float], seconds: Sequence[float]) -> str:
  of = lambda each: (statistics.mean(map(abs, each)), max(map(abs, each), default=0.0), len(each))
  within = sum(abs(each) <= 0.1 for each in memory) / max(len(memory), 1)
  return (
      "Memory is off by {:.1%} on average and {:.0%} at most ({} programs), ".format(*of(memory))
      + f"and {within:.0%} of the programs are within 10%. "
      + "Seconds are off by {:.1%} on average and {:.0%} at most ({} programs).\n".format(*of(seconds))
  )


def _parse(argv: list[str] | None) -> argparse.Namespace:
  parser = argparse.ArgumentParser(prog="python -m benchmarks.held_back", description=__doc__.splitlines()[0])
  parser.add_argument("--model", nargs="+", choices=list(MODELS), metavar="NAME", help="these, also if they have results")
  parser.add_argument("--at-most", type=int, default=-1, metavar="N", help="compile at most so many programs")
  return compile_step.parse(parser, argv, output="held_back", impl=list(_IMPLEMENTATIONS), minutes=60.0)


if __name__ == "__main__":
  sys.exit(interruption.run(main, "held_back"))

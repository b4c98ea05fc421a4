# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""What MaxText's own `maxtext.utils.estimator` finds for a batch, beside what `maxtext-pp plan` finds.

  python -m benchmarks.estimator                      every model that has no result yet
  python -m benchmarks.estimator --model llama3-8b    one of them, again; with --plan, only what plan finds

The estimator looks for a remat policy that fits, and compiles one after another until one does. `plan` compiles nothing.
Both searches run in a process of their own, with the same keys and XLA flags. Then the steps that they found are
compiled: the estimator's policy without a pipeline, and of the plan its first row, and the one without a pipeline. Needs
the extra `tools` (libtpu). A model takes ten minutes to an hour of two cores. Results are kept in
`results/estimator.{json,md}` after each.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
from typing import Any

from rich import console as rich_console

from benchmarks import compile_step, held_back, shapes, tables
from maxtext_pp_ext.compiled import flags
from maxtext_pp_ext.host.models import run_config, variants
from maxtext_pp_ext.processes import interruption

_WHOLE_GATHERS = "DISABLE_COLLECTIVE_MATMUL"
_INPUT = "decoder_layer_input=device"  # which the estimator adds


def _keys(model: str, topology: str, batch: int, length: int, **keys: int) -> dict[str, object]:
  sizes = {"per_device_batch_size": batch, "max_target_length": length, "ici_fsdp_parallelism": -1}
  return {"model_name": model, "compile_topology": topology, "allow_split_physical_axes": True, **sizes, **keys}


MODELS = {
    "llama3-8b": _keys("llama3-8b", "v6e-16", 4, 2048),
    "mistral-7b": _keys("mistral-7b", "v6e-8", 2, 2048),
    "qwen3-14b": _keys("qwen3-14b", "v5p-32", 4, 2048),
    "qwen2.5-7b": _keys("qwen2.5-7b", "v5e-32", 1, 2048),
    "mixtral-8x7b": _keys("mixtral-8x7b", "v5p-64", 2, 2048, ici_expert_parallelism=4),
}
ESTIMATOR, PLAN_NONE, PLAN = "estimator", "plan, none", "plan"
_HEADER = ("model", "estimator: CPU s", "compilations", "step s", "plan: CPU s", "none: step s", "first row: step s")
_INTRODUCTION = """# MaxText's estimator and plan

`python -m benchmarks.estimator` printed this: CPU seconds of a search, and the projected seconds (docs/seconds.md) of \
the steps that were found. In parentheses the ratio to the estimator's.
"""
Results = dict[str, dict[str, Any]]  # by model: the searches, and figures of the steps


def main(argv: list[str] | None = None) -> None:
  options = _parse(argv)
  console, json_file = rich_console.Console(), options.output.with_suffix(".json")
  results: Results = tables.read(json_file)
  for model in options.model or [each for each in MODELS if (each in results) == options.plan]:
    before = results.get(model, {}) if options.plan else {}
    of_estimator = before["searches"][ESTIMATOR] if before else estimated(model)
    found: dict[str, Any] = {"searches": {ESTIMATOR: of_estimator, PLAN: planned(model)}, "steps": {}}
    if failure := of_estimator.get("failure"):
      console.print(f"{model}, {ESTIMATOR}: {failure}", markup=False, highlight=False, soft_wrap=True)
    for name, given in steps(model, found["searches"]).items():
      known = before.get("steps", {}).get(name, {})
      # Without our engine a step is what it was.
      if name != PLAN and known.get("arguments") == given and before["versions"] == compile_step.versions():
        found["steps"][name] = known
        continue
      figures = compile_step.compile_step(
          given, label=f"{model}, {name}", names=[model, name], options=options, console=console
      )
      found["steps"][name] = {**figures, "arguments": given}
    results[model] = {**found, "versions": compile_step.versions()}
    tables.write(json_file, results)
    options.output.with_suffix(".md").write_text(report(results), encoding="utf-8")
  console.print(report(results), markup=False, highlight=False, soft_wrap=True)


def arguments(model: str) -> list[str]:
  """MaxText's command-line arguments, as both searches get them."""
  chip, _, _ = str(MODELS[model]["compile_topology"]).partition("-")
  sets, lacking = held_back.SETS[chip]
  # Where XLA gathers within products, these take twice as long without a window; on v5p it does not.
  more = [] if chip == "v5p" or _WHOLE_GATHERS in sets else [_WHOLE_GATHERS]
  keys = shapes.COMMON | MODELS[model] | {flags.KEY: flags.joined("", [*sets, *more], lacking)}
  return [f"{key}={value}" for key, value in keys.items()]  # without our keys: those of a policy would pin it


def estimated(model: str) -> dict[str, Any]:
  """Runs the estimator. Returns its policy as `key=value`, its compilations and CPU seconds, or `failure`."""
  given = [str(run_config.base_yml()), *arguments(model), "write_estimator_result=false"]
  environment = os.environ | {"MAXTEXT_PP_EXT": "off", "DECOUPLE_GCLOUD": "TRUE", "JAX_PLATFORMS": "cpu"}
  printed, seconds = _run([sys.executable, "-m", "maxtext.utils.estimator", *given], environment)
  if not (policy := re.findall(r"Found valid combo: .*policy=(\{.*\})", printed)):
    return {"failure": printed[-2000:], "cpu_s": seconds}
  keys = [f"{name}={place}" for name, place in ast.literal_eval(policy[-1]).items()]
  return {
      "keys": ["remat_policy=custom", *keys, _INPUT],
      "compilations": len(re.findall("Is OOM:", printed)),
      "cpu_s": seconds,
  }


def planned(model: str) -> dict[str, Any]:
  """Runs `maxtext-pp plan`. Returns its first row and the one without a pipeline, and CPU seconds."""
  printed, seconds = _run([sys.executable, "-m", "maxtext_pp_ext.cli", "plan", "--json", *arguments(model)], os.environ)
  rows = json.loads(printed)["candidates"]
  none = next(row for row in rows if row["impl"] == variants.NONE)
  return {
      "rows": {name: {"impl": row["impl"], "keys": row["keys"]} for name, row in ((PLAN_NONE, none), (PLAN, rows[0]))},
      "cpu_s": seconds,
  }


def steps(model: str, searches: dict[str, Any]) -> dict[str, list[str]]:
  """MaxText's arguments of each step that the searches found; one that both rows of the plan are is there once."""
  found = {}
  if "keys" in searches[ESTIMATOR]:
    keys = dict(key.split("=", 1) for key in searches[ESTIMATOR]["keys"])
    found[ESTIMATOR] = run_config.with_keys(arguments(model), keys)
  rows = searches[PLAN]["rows"]
  for name in [PLAN_NONE] if rows[PLAN] == rows[PLAN_NONE] else [PLAN_NONE, PLAN]:
    given = run_config.with_keys(arguments(model), rows[name]["keys"])
    found[name] = variants.arguments(rows[name]["impl"], given, platform="tpu")
  return found


def seconds(found: dict[str, Any], name: str) -> float | None:
  """Projected seconds of a step; those of the plan's first row are those of its other one, if it is the same."""
  steps_found = found["steps"]
  figures = steps_found.get(name, steps_found.get(PLAN_NONE, {}) if name == PLAN else {})
  return figures.get("projection", {}).get("step_s")


def report(results: Results) -> str:
  """The Markdown file: the table, how the steps compare on average, and the keys that were found."""
  rows, ratios, found_keys = [], [], []
  for model in (each for each in MODELS if each in results):
    found, searches = results[model], results[model]["searches"]
    base, none, first = (seconds(found, name) for name in (ESTIMATOR, PLAN_NONE, PLAN))
    ratios += [first / base] if base and first else []
    estimator = searches[ESTIMATOR]
    rows.append(
        (
            model,
            tables.number(estimator["cpu_s"], 0),
            str(estimator.get("compilations", tables.MISSING)),
            tables.number(base, 3),
            tables.number(searches[PLAN]["cpu_s"], 1),
            tables.with_ratio(none, base, 3),
            tables.with_ratio(first, base, 3),
        )
    )
    chosen = searches[PLAN]["rows"][PLAN]
    of_plan = " ".join(f"{key}={value}" for key, value in chosen["keys"].items())
    found_keys += [f"- {model}, estimator: `{' '.join(estimator.get('keys', ['failed']))}`"]
    found_keys += [f"- {model}, plan: {chosen['impl']}, `{of_plan}`"]
  parts = [_INTRODUCTION, tables.markdown(_HEADER, rows)]
  if ratios:
    parts.append(
        f"\nThe plan's first row takes {statistics.mean(ratios):.2f} times the seconds of the estimator's policy on "
        f"average, and {max(ratios):.2f} times at most.\n"
    )
  return "\n".join([*parts, *found_keys]) + "\n"


def _run(command: list[str], environment: Any) -> tuple[str, float]:
  """Returns what a command prints, and its CPU seconds, those of its children included."""
  of_children = lambda: sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
  before = of_children()
  with tempfile.TemporaryDirectory() as folder:  # MaxText writes into the folder in which it starts
    here = os.pathsep.join(filter(None, [os.getcwd(), environment.get("PYTHONPATH")]))
    done = subprocess.run(
        command, env={**environment, "PYTHONPATH": here}, cwd=folder, capture_output=True, text=True, check=False
    )
  return done.stdout or done.stderr, of_children() - before


def _parse(argv: list[str] | None) -> argparse.Namespace:
  parser = argparse.ArgumentParser(prog="python -m benchmarks.estimator", description=__doc__.splitlines()[0])
  models = "these, also if they have a result"
  parser.add_argument("--model", nargs="+", choices=sorted(MODELS), metavar="NAME", help=models)
  parser.add_argument("--plan", action="store_true", help="only what plan finds again, beside the estimator's result")
  return compile_step.parse(parser, argv, output="estimator", impl=[], minutes=60.0)


if __name__ == "__main__":
  sys.exit(interruption.run(main, "estimator"))

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.trainer.table`: trains every case of `cases`, and writes how far apart the runs are into results.json.

Takes half an hour on two cores. `--stages N …` trains the cases with these numbers of stages only, and keeps the results
of the others. `--folder F` keeps the runs in F; `--table-only` reads the runs of an earlier call there. `markdown` is the
table of results.json for the page docs/trainer-table.md, which `make docs` writes.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
import itertools
import pathlib
import sys
from typing import Any

from maxtext_pp_ext.processes import interruption
from tests import conftest as _  # noqa: F401  (the environment of the tests, compiled programs kept)
from tests import tables
from tests.trainer import cases
from tests.trainer.runs import Results, run_all

RESULTS = pathlib.Path(__file__).resolve().parent / "results.json"
NAMES = {
    cases.PRETRAIN: "pre-training",
    cases.SFT: "SFT",
    cases.ACCUMULATION: "pre-training, `gradient_accumulation_steps=2`",
}


def main(argv: list[str] | None = None) -> int:
  parser = argparse.ArgumentParser(prog="python -m tests.trainer.table", description=__doc__)
  parser.add_argument("--folder", type=pathlib.Path)
  parser.add_argument("--table-only", action="store_true")
  parser.add_argument("--stages", type=int, nargs="+", choices=list(cases.PIPELINES), default=list(cases.PIPELINES))
  arguments = parser.parse_args(argv)
  if arguments.table_only and arguments.folder is None:
    parser.error("--table-only: say with --folder where the runs are")
  with interruption.temporary_folder() as temporary:
    folder = (arguments.folder or pathlib.Path(temporary)).resolve()
    chosen = [case for case in cases.all_cases() if case.stages in arguments.stages]
    results = Results(folder) if arguments.table_only else train(folder, chosen)
    found = {case.name: compared(results, case) for case in chosen}
  known = tables.read(RESULTS) | found
  tables.write(RESULTS, {case.name: known[case.name] for case in cases.all_cases() if case.name in known})
  print("\n".join(markdown(known)))
  return 0 if all(result["agrees"] for result in found.values()) else 1


def train(folder: pathlib.Path, chosen: Sequence[cases.Case]) -> Results:
  folder.mkdir(parents=True, exist_ok=True)
  cases.write_data(folder)
  return run_all(folder, cases.runs_of(chosen), devices=cases.DEVICES, weights=cases.weights_of(chosen))


def compared(results: Results, case: cases.Case) -> dict[str, Any]:
  """The largest difference of each metric, what is allowed at the last step, and whether every step agrees."""
  found = list(cases.compare(results, case.name, case.reference))
  return {
      "differences": [max(each.difference) for each in found],
      "allowed": [max(each.allowed) for each in found],
      "agrees": all(each.agrees for each in found),
  }


def markdown(results: Mapping[str, Any]) -> Iterator[str]:
  """Lines of a table of results by the names of their cases: a row for each model, mode and number of stages."""
  heads = [f"`{name}`" for name in cases.IMPLEMENTATIONS]
  yield f"| model | training | stages × repeats × layers per stage | {' | '.join(heads)} | allowed |"
  yield "|---|---|---" + "|---" * (len(heads) + 1) + "|"
  for model, mode, stages in itertools.product(cases.MODELS, NAMES, cases.PIPELINES):
    row = [results.get(cases.Case(model, mode, stages, name).name) for name in cases.IMPLEMENTATIONS]
    cells = [_cell(result["differences"], result["agrees"]) if result else "" for result in row]
    allowed = [_cell(result["allowed"], True) for result in row if result]
    yield f"| {model} | {NAMES[mode]} | {_layout(stages)} | {' | '.join([*cells, *allowed[-1:]])} |"


def _cell(numbers: Sequence[float], agrees: bool) -> str:
  text = " / ".join(f"{number:.1e}" for number in numbers)
  return text if agrees else f"**{text}**"


def _layout(stages: int) -> str:
  if stages == 1:
    return f"1 × {cases.LAYERS} × 1"
  per_stage = cases.PIPELINES[stages]["num_layers_per_pipeline_stage"]
  return f"{stages} × {cases.LAYERS // stages // per_stage} × {per_stage}"


if __name__ == "__main__":
  sys.exit(interruption.run(main, "tests.trainer.table"))

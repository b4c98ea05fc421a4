# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.trainer.table`: trains every case of `cases` for docs/trainer-parity.md.

Takes half an hour on two cores. `--stages N …` trains the cases with these numbers of stages only, and keeps the table's
other lines. `--folder F` keeps the runs in F; `--table-only` reads the runs of an earlier call there.
"""

import argparse
from collections.abc import Sequence
import itertools
import pathlib
import sys

from maxtext_pp_ext.processes import interruption
from maxtext_pp_ext.trainer_runs.train_runs import Results, run_all
from tests import conftest as _  # noqa: F401  (the environment of the tests, compiled programs kept)
from tests.tables import between, put_between
from tests.trainer import cases

DOCUMENT = pathlib.Path(__file__).resolve().parents[2] / "docs" / "trainer-parity.md"
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
    lines, agree = table(results, chosen, between(DOCUMENT).splitlines())
  put_between(DOCUMENT, lines)
  print("\n".join(lines))
  return 0 if agree else 1


def train(folder: pathlib.Path, chosen: Sequence[cases.Case]) -> Results:
  folder.mkdir(parents=True, exist_ok=True)
  cases.write_data(folder)
  return run_all(folder, cases.runs_of(chosen), devices=cases.DEVICES, weights=cases.weights_of(chosen))


def table(results: Results, chosen: Sequence[cases.Case], before: Sequence[str]) -> tuple[list[str], bool]:
  """One line per model, mode and number of stages, from the chosen cases or before; and whether all of these agree."""
  heads = [f"`{name}`" for name in cases.IMPLEMENTATIONS]
  lines = [
      f"| model | training | stages × repeats × layers per stage | {' | '.join(heads)} | allowed |",
      "|---|---|---" + "|---" * (len(heads) + 1) + "|",
  ]
  agree = True
  for model, mode, stages in itertools.product(cases.MODELS, NAMES, cases.PIPELINES):
    cells, allowed = [], ""
    first = f"| {model} | {NAMES[mode]} | {_layout(stages)} |"
    if not any(case.stages == stages for case in chosen):
      lines += [line for line in before if line.startswith(first)]
      continue
    for name in cases.IMPLEMENTATIONS:
      case = cases.Case(model, mode, stages, name)
      if case not in chosen:
        cells.append("")
        continue
      compared = list(cases.compare(results, case.name, case.reference))
      agree = agree and all(c.agrees for c in compared)
      cells.append(_cell([max(c.difference) for c in compared], all(c.agrees for c in compared)))
      allowed = _cell([max(c.allowed) for c in compared], True)
    lines.append(f"{first} {' | '.join(cells)} | {allowed} |")
  return lines, agree


def _cell(numbers: list[float], agrees: bool) -> str:
  text = " / ".join(f"{number:.1e}" for number in numbers)
  return text if agrees else f"**{text}**"


def _layout(stages: int) -> str:
  if stages == 1:
    return f"1 × {cases.LAYERS} × 1"
  per_stage = cases.PIPELINES[stages]["num_layers_per_pipeline_stage"]
  return f"{stages} × {cases.LAYERS // stages // per_stage} × {per_stage}"


if __name__ == "__main__":
  sys.exit(interruption.run(main, "tests.trainer.table"))

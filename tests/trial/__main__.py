# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.trial` draws configurations that no test has, and trains each with a pipeline and without.

MaxText's own training loop trains both, on 8 virtual devices in this process, from equal weights, on packed rows of very
different lengths. All metrics, parameters and moments of the optimizer are compared. What rounding explains is measured
by a control: the model without a pipeline from weights that are moved by a unit in the last place.

Outcomes are kept in --folder; a later run goes on where one ended. The exit code is 1 if a configuration is different or
crashes.
"""

import argparse
import dataclasses
import json
import pathlib
import time
from typing import Any

from rich.console import Console
from rich.table import Table

from tests import conftest  # noqa: F401  (the environment of the tests; before anything imports JAX)

# isort: split

import maxtext_pp_ext

CHECKOUT = pathlib.Path(__file__).resolve().parents[2]


def main(argv: list[str] | None = None) -> int:
  """Runs the command; returns its exit status."""
  maxtext_pp_ext.install()
  from tests.trial import judge, space  # pylint: disable=import-outside-toplevel

  parser = argparse.ArgumentParser(
      prog="python -m tests.trial", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--seed", type=int, default=0, help="another seed draws others")
  parser.add_argument("--count", type=int, default=30, help="number of configurations")
  parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help=f"areas ({', '.join(space.AREAS)}) or names")
  parser.add_argument("--again", action="store_true", help="train also what has an outcome")
  parser.add_argument("--details", action="store_true", help="print largest differences, and where errors come from")
  parser.add_argument(
      "--folder", type=pathlib.Path, default=CHECKOUT / ".cache" / "trial", help="where outcomes are kept"
  )
  options = parser.parse_args(argv)
  options.folder.mkdir(parents=True, exist_ok=True)
  console, file = Console(width=160), options.folder / "outcomes.jsonl"
  known = _read(file)
  rows = []
  for configuration in space.draw(options.seed, options.count, options.only):
    outcome = None if options.again else known.get(configuration.text)
    if outcome is None:
      begin = time.monotonic()
      _write(file, configuration.text, judge.Outcome(verdict=judge.CRASH, said="the process ended"))  # until it is known
      outcome = judge.judge(configuration)
      _write(file, configuration.text, outcome)
      seconds = time.monotonic() - begin
      console.print(f"{configuration.name} {outcome.verdict} ({seconds:.0f} s): {outcome.said[:300]}", markup=False)
      if outcome.verdict in judge.FAULTS or options.details:
        console.print(f"    {configuration.text}", markup=False, soft_wrap=True)
      if options.details:
        console.print("\n".join(outcome.details), markup=False, soft_wrap=True)
    rows.append((configuration, outcome))
  table = Table("configuration", "outcome", "of what rounding explains", "worst, or message")
  for configuration, outcome in rows:
    table.add_row(configuration.name, outcome.verdict, f"{outcome.ratio:.2f}", outcome.said[:200])
  console.print(table)
  return 1 if any(outcome.verdict in judge.FAULTS for _, outcome in rows) else 0


def _write(file: pathlib.Path, text: str, outcome: Any) -> None:
  with file.open("a", encoding="utf-8") as lines:
    lines.write(json.dumps({"text": text, **dataclasses.asdict(outcome)}) + "\n")


def _read(file: pathlib.Path) -> dict:
  """Outcomes by the text of their configurations; of several the last."""
  from tests.trial import judge  # pylint: disable=import-outside-toplevel

  if not file.exists():
    return {}
  lines = map(json.loads, file.read_text(encoding="utf-8").splitlines())
  return {line.pop("text"): judge.Outcome(**line | {"details": tuple(line["details"])}) for line in lines}


if __name__ == "__main__":
  raise SystemExit(main())

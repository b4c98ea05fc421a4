# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.mutants [--only NAME …]`: shows that the tests notice faults that train the wrong model.

Each fault is put into a copy of the package, and the one test that has to notice it is run against that copy. The exit
code is 1 unless all faults are caught. It is also 1 if the text that a fault replaces is missing, or if a test fails
without the fault.
"""

import argparse
import pathlib
import sys
import time

from maxtext_pp_ext.processes import interruption
from tests.mutants import runner, table

CHECKOUT = pathlib.Path(__file__).resolve().parents[2]


def main(arguments: list[str] | None = None) -> int:
  """Runs the command; returns its exit status."""
  parser = argparse.ArgumentParser(
      prog="python -m tests.mutants", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--only", nargs="+", metavar="NAME", choices=list(table.MUTANTS), help="only these")
  parser.add_argument("--list", action="store_true", help="print the table of all faults, and run nothing")
  options = parser.parse_args(arguments)
  if options.list:
    print(table.markdown())
    return 0
  chosen = [table.MUTANTS[name] for name in options.only or table.MUTANTS]
  start = time.monotonic()
  say = lambda line: print(line, flush=True)
  outcomes = runner.Runner(checkout=CHECKOUT, say=say).run(chosen)
  missed = [outcome.mutant.name for outcome in outcomes if outcome.verdict != runner.CAUGHT]
  ways = sum(any(mutant in chosen for mutant in mutants) for mutants in table.WAYS.values())
  say(f"{len(outcomes) - len(missed)} of {len(outcomes)} caught, of {ways} ways, in {time.monotonic() - start:.0f} s")
  if missed:
    say(f"not caught: {', '.join(missed)}")
  return 1 if missed else 0


if __name__ == "__main__":
  sys.exit(interruption.run(main, "mutants"))

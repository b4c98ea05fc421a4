# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""`runs.main` in a process that gets a signal at one file operation: `python -m tests.reliability.dying JSON PLAN`.

JSON is a `Death`. File operations show what a run is doing, and come in the same order each time, so the run can be
interrupted at an exact place.
"""

import dataclasses
import json
import os
import sys


@dataclasses.dataclass(frozen=True, kw_only=True)
class Death:
  """When a process gets a signal: right before the `count`-th occurrence of this event for a file of this name.

  Attributes:
    signal: the signal's number; 0 raises an exception instead.
    event: name of the audit event, https://docs.python.org/3/library/audit_events.html.
    path: how the file's path ends.
    count: from 1.
    process: which of several processes.
  """

  signal: int
  event: str
  path: str
  count: int = 1
  process: int = 0


def arguments(death: Death, plan: str) -> list[str]:
  """Python's arguments for a process that dies in this way; `plan` is the result of `runs.write_plan`."""
  return ["-m", "tests.reliability.dying", json.dumps(dataclasses.asdict(death)), plan]


def main() -> None:
  death = Death(**json.loads(sys.argv[1]))
  seen = 0

  def count(event, args):
    nonlocal seen
    if event != death.event or not args or not isinstance(args[0], (str, os.PathLike)):
      return
    if os.fspath(args[0]).endswith(death.path):
      seen += 1
      if seen == death.count and not death.signal:
        raise RuntimeError("dying as it was told to")
      if seen == death.count:
        os.kill(os.getpid(), death.signal)

  import jax  # pylint: disable=import-outside-toplevel

  from tests.trainer import runs  # pylint: disable=import-outside-toplevel

  if not jax.distributed.is_initialized() or jax.process_index() == death.process:
    sys.addaudithook(count)
  runs.main(sys.argv[2])


if __name__ == "__main__":
  main()

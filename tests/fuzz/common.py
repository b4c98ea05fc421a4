# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs a command with bad input in this process, and judges how it ended."""

from collections.abc import Iterator, Sequence
import contextlib
import json
import pathlib
import signal

from maxtext_pp_ext import cli

# What a command may take that finds its input bad, on a busy machine.
SECONDS = 120
REFUSED, ACCEPTED, NO = "refused", "accepted", "answered no"


@contextlib.contextmanager
def within(seconds: int = SECONDS) -> Iterator[None]:
  """Fails if the block takes longer."""

  def stop(*_):
    raise AssertionError(f"hangs: more than {seconds} s")

  before = signal.signal(signal.SIGALRM, stop)
  signal.alarm(seconds)
  try:
    yield
  finally:
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def contents(folder: pathlib.Path) -> dict[str, bytes | None]:
  """Every file below a folder with its content, and every other entry."""
  return {
      str(path.relative_to(folder)): path.read_bytes() if path.is_file() and not path.is_symlink() else None
      for path in folder.rglob("*")
  }


def run(capfd, folder: pathlib.Path, argv: Sequence[str]) -> tuple[str, str]:
  """(REFUSED, ACCEPTED or NO, the output) of `maxtext-pp argv`; an assertion fails for any other outcome.

  REFUSED means exit code 2, an error, no traceback, and nothing written in the folder.
  """
  before = contents(folder)
  capfd.readouterr()
  try:
    with within():
      code = cli.main(list(argv))
  except SystemExit as ended:  # argparse
    code = ended.code
  said = capfd.readouterr()
  assert "Traceback" not in said.out + said.err, said
  if code == 0:
    return ACCEPTED, said.out
  assert contents(folder) == before, (argv, contents(folder).keys() ^ before.keys())
  if code == 1:
    return NO, said.out + said.err
  assert code == 2, (argv, code)
  errors = [line for line in said.err.splitlines() if line.startswith("maxtext-pp")]  # argparse: maxtext-pp NAME: error:
  errors += [line for line in said.out.splitlines() if line.startswith("error: ")]
  if said.out.startswith("{"):  # --json
    errors += [f"error: {text}" for text in json.loads(said.out)["errors"]]
  assert errors and all(error.partition(":")[2].strip() for error in errors), (argv, said)
  return REFUSED, said.out + said.err

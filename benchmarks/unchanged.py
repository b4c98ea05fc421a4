# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Compares the train steps that two versions of this package compile for TPUs, to show that a change changed nothing.

  python -m benchmarks.unchanged --base REV               compile all cases with REV and with the working tree
  python -m benchmarks.unchanged --base REV --only dense  only cases whose names contain this

Both versions run `maxtext-pp compare`, which compiles the step, projects its seconds and reads its traffic and memory. A
case is unchanged if the optimised programs are the same but for names, numbers of instructions and lines of source code.
A case with other programs passes if seconds, bytes and memory agree within 0.1 %. The figures of equal programs have to
agree, too: each version reads its program itself. Otherwise the command ends with 1.

Compiling a case takes one to two minutes. `.cache/unchanged/TREE/` keeps what the base compiled, for the next time.
`.cache/unchanged/new/` keeps what the working tree compiled, for `diff`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
import dataclasses
import io
import itertools
import json
import os
import pathlib
import re
import subprocess
import sys
import tarfile
from typing import Any

from rich import console as rich_console

from benchmarks import overlap, tables
from maxtext_pp_ext.compiled import child, limits
from maxtext_pp_ext.processes import interruption

ROOT = pathlib.Path(__file__).resolve().parents[1]
CACHE = ROOT / ".cache" / "unchanged"
TOLERANCE = 1e-3
STEP, PART = "projected seconds", "seconds of "

_COMMON = (
    *("override_model_config=True", "base_num_decoder_layers=8", "attention=flash", "max_target_length=1024"),
    "per_device_batch_size=2",
)
_DENSE = (*_COMMON, "model_name=llama3-8b")
_EXPERTS = (*_COMMON, "model_name=mixtral-8x7b")
_SPARSECORES = f"compile_xla_flags={overlap.SPARSE_CORE_FLAGS}"
# Text of the optimised HLO that says where an instruction comes from.
_METADATA = re.compile(r', metadata=\{(?:[^"{}]|"(?:\\.|[^"\\])*")*\}')
_SIGNATURE = re.compile(r"^((?:ENTRY )?%[^ ]+) \(.*\{$")  # of a computation, whose parameters follow as instructions
_NAME = re.compile(r"%[\w.-]+|\bchannel_id=\d+")
_COMPUTATION = ("%", "ENTRY ")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
  """A step to compile."""

  impl: str  # its name in `maxtext-pp compare`
  keys: tuple[str, ...]  # MaxText's arguments

  @property
  def arguments(self) -> list[str]:
    """Arguments of `maxtext-pp`."""
    return ["compare", *self.keys, "--impl", self.impl]


def _sharded(topology: str, **sizes: int) -> tuple[str, ...]:
  return (f"compile_topology={topology}", *(f"ici_{axis}_parallelism={size}" for axis, size in sizes.items()))


CASES = {
    "dense, window, SparseCores": Case(
        impl="window",
        keys=(*_DENSE, *_sharded("v6e-16", fsdp=16), "num_pipeline_microbatches=2", _SPARSECORES),
    ),
    "dense, 2 stages": Case(
        impl="circular_bsw",
        keys=(*_DENSE, *_sharded("v5p-16", pipeline=2, fsdp=4), "num_pipeline_microbatches=4"),
    ),
    "dense, 4 stages, SparseCores": Case(
        impl="circular_bsw",
        keys=(*_DENSE, *_sharded("v6e-16", pipeline=4, fsdp=4), "num_pipeline_microbatches=4", _SPARSECORES),
    ),
    "experts, window": Case(
        impl="window",
        keys=(*_EXPERTS, *_sharded("v5p-16", expert=4, fsdp=2), "num_pipeline_microbatches=2"),
    ),
    "experts, 2 stages, SparseCores": Case(
        impl="circular_bsw",
        keys=(*_EXPERTS, *_sharded("v5p-16", pipeline=2, expert=2, fsdp=2), "num_pipeline_microbatches=4", _SPARSECORES),
    ),
    "experts, 4 stages": Case(
        impl="circular_bsw",
        keys=(*_EXPERTS, *_sharded("v5p-32", pipeline=4, expert=2, fsdp=2), "num_pipeline_microbatches=4"),
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
  """What a version compiled."""

  program: str  # the optimised HLO, see `normalised`
  # What it projects and reads, per device: the seconds, the bytes on the wire and the peak of memory.
  figures: dict[str, float]


def normalised(program: str) -> str:
  """Returns optimised HLO without what differs between equal programs: names, source lines, signatures repeated."""
  lines = program.splitlines()
  start = next(at for at, line in enumerate(lines) if line.startswith(_COMPUTATION))
  numbers: dict[str, str] = {}

  def name(match: re.Match[str]) -> str:
    return numbers.setdefault(match[0], f"%{len(numbers)}")

  kept = (_SIGNATURE.sub(r"\1 {", _METADATA.sub("", line)) for line in itertools.chain(lines[:1], lines[start:]))
  return "\n".join(_NAME.sub(name, line) for line in kept) + "\n"


def differences(base: Compiled, new: Compiled) -> Iterator[str]:
  """Yields each figure that differs by more than TOLERANCE. A difference of parts of a step is compared to the step."""
  for name in sorted(base.figures.keys() | new.figures.keys()):
    before, after = base.figures.get(name, 0.0), new.figures.get(name, 0.0)
    whole = base.figures.get(STEP, before) if name.startswith(PART) else before
    if abs(after - before) > TOLERANCE * abs(whole):
      yield f"{name}: {before} before, {after} now"


def verdict(base: Compiled, new: Compiled) -> tuple[bool, str]:
  """Whether nothing changed that counts, and what did."""
  found = list(differences(base, new))
  same = base.program == new.program
  words = "the same program" if same else "another program"
  if not same:
    pairs = itertools.zip_longest(base.program.splitlines(), new.program.splitlines())
    words += f" from line {next(at for at, (before, after) in enumerate(pairs, 1) if before != after)} on"
  return not found, f"{words}, {'; '.join(found) or 'the same figures'}"


def environment(package: pathlib.Path, dump: pathlib.Path) -> dict[str, str]:
  """The environment of a command that uses the package in this folder, and dumps the step's HLO into that one."""
  return os.environ | {
      "PYTHONPATH": str(package),
      "PYTHONSAFEPATH": "1",  # else the working directory comes before PYTHONPATH
      "XLA_FLAGS": f"--xla_dump_to={dump} --xla_dump_hlo_as_text --xla_dump_large_constants "
      "--xla_dump_hlo_module_re=.*train_step.*",
  }


def compiled(case: Case, package: pathlib.Path, bounds: limits.Limits) -> Compiled:
  """Compiles with the package in a folder. Raises RuntimeError if that fails."""
  with interruption.temporary_folder() as name:
    folder = pathlib.Path(name)
    result, log = folder / "result.json", folder / "log.txt"
    command = [sys.executable, "-m", "maxtext_pp_ext.cli", *case.arguments, "--result", str(result), "--json"]
    failure, _ = limits.run(command, log=log, limits=bounds, environment=environment(package, folder))
    if failure:
      raise RuntimeError(f"{failure}\n{log.read_text(encoding='utf-8')[-2000:]}")
    (row,) = json.loads(result.read_text(encoding="utf-8"))["implementations"].values()
    (program,) = folder.glob("*.after_optimizations.txt")
    return Compiled(program=normalised(program.read_text(encoding="utf-8")), figures=figures(row))


def figures(row: dict[str, Any]) -> dict[str, float]:
  """The figures that are compared, of a row of `maxtext-pp compare --json`."""
  projection = row["projection"]
  return {
      STEP: projection["step_s"],
      "bytes on the wire": sum(each["wire_bytes"] for each in row["transfers"]),
      "peak bytes": row["bytes"]["peak"],
      "dot FLOPs": row["dot_flops"],
      **{f"{PART}{name}": seconds for name, seconds in projection["parts"].items()},
  }


def of_version(
    name: str, package: pathlib.Path, folder: pathlib.Path, bounds: limits.Limits, *, reuse: bool = False
) -> Compiled:
  """Compiles a case with a version of the package, and keeps it in a folder.

  Args:
    name: of the case.
    package: the folder that has `maxtext_pp_ext`.
    folder: for the program and its figures.
    bounds: limits of wall time and host memory.
    reuse: takes what is in the folder if it was compiled with the same arguments and packages.
  """
  case = CASES[name]
  file, program = (folder / f"{re.sub('[, ]+', '-', name)}.{suffix}" for suffix in ("json", "hlo"))
  of = {"arguments": case.arguments, "versions": child.versions()}
  if reuse and (known := tables.read(file)) and all(known[key] == value for key, value in of.items()):
    return Compiled(program=program.read_text(encoding="utf-8"), figures=known["figures"])
  found = compiled(case, package, bounds)
  folder.mkdir(parents=True, exist_ok=True)
  program.write_text(found.program, encoding="utf-8")
  tables.write(file, of | {"figures": found.figures})
  return found


def export(revision: str, folder: pathlib.Path) -> None:
  """Writes the package as a git revision has it into a folder."""
  archive = subprocess.run(["git", "archive", revision, "maxtext_pp_ext"], cwd=ROOT, stdout=subprocess.PIPE, check=True)
  with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
    files.extractall(folder, filter="data")


def main(argv: Sequence[str] | None = None) -> int:
  parser = argparse.ArgumentParser(
      prog="python -m benchmarks.unchanged", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--base", required=True, metavar="REV", help="the git revision to compare with")
  parser.add_argument("--only", default="", metavar="WORDS", help="only cases whose names contain this")
  parser.add_argument("--minutes", type=float, default=20.0, help="wall time per compilation (default: %(default)s)")
  options = parser.parse_args(argv)
  bounds = limits.Limits(seconds=options.minutes * 60)
  of_package = ["git", "rev-parse", "--verify", f"{options.base}:maxtext_pp_ext"]
  tree = subprocess.run(of_package, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
  console, changed = rich_console.Console(), []
  with interruption.temporary_folder() as package:
    export(options.base, pathlib.Path(package))
    for name in (name for name in CASES if options.only in name):
      with console.status(name) as status:
        base = of_version(name, pathlib.Path(package), CACHE / tree, bounds, reuse=True)
        status.update(f"{name}, working tree")
        new = of_version(name, ROOT, CACHE / "new", bounds)
      same, words = verdict(base, new)
      console.print(f"{name}: {words}", markup=False, highlight=False, soft_wrap=True)
      changed += [] if same else [name]
  console.print(f"Changed: {'; '.join(changed)}." if changed else "Nothing changed.", markup=False, highlight=False)
  return 1 if changed else 0


if __name__ == "__main__":
  sys.exit(interruption.run(main, "unchanged"))

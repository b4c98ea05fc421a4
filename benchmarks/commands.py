# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""CPU seconds of `maxtext-pp plan` and `maxtext-pp check`, which compile nothing, for every model that MaxText ships.

  python -m benchmarks.commands [--models …] [--commands plan check] [--keep FOLDER]

Each command runs in a process of its own, one after the other. CPU seconds are user and system time. They depend less on
other load of the machine than wall time does. `plan` is meant to take less than 15 s, `check` less than 10 s. A command
that takes longer has a star, and fails nothing. --keep keeps what the commands print, to compare it with what another
version prints.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from typing import Any

from rich.progress import track

from benchmarks import compile_step, tables
from maxtext_pp_ext.host import arguments as known
from maxtext_pp_ext.host.models import run_config

# The CPU seconds that a command is meant to take at most.
LIMITS = {"plan": 15.0, "check": 10.0}
_ARGUMENTS = {
    "plan": ("compile_topology=v5p-256",),
    # The window, since not every model can be pipelined.
    "check": ("compile_topology=v5p-256", "pipeline_impl=circular_bsw"),
}
# Keys without which MaxText refuses a model, by a pattern of its name.
_KEYS = {
    r"deepseek3\.2|deepseek4|deepseek-custom": ("attention=dot_product",),
    # Its n-gram tables need a tokenizer from the network.
    r"deepseek-custom": ("override_model_config=True", "engram_layers=[]"),
    r"gemma4-e|qwen3-vl-[24]b|weaver": ("scan_layers=False",),
}
_EXIT_CODES = {0: "", 1: "nothing fits", 2: "refused"}
_HEADER = ("model", *(f"{command}: {what}" for command in LIMITS for what in ("CPU s", "")))


def models() -> list[str]:
  """The names of MaxText's models. Its config accepts no other names, also where there is a file."""
  files = {file.stem for file in run_config.base_yml().with_name("models").glob("*.yml")}
  return [name for name in sorted(known.model_names()) if name in files]


def arguments(command: str, model: str) -> list[str]:
  """Returns the arguments of `maxtext-pp`."""
  keys = [key for pattern, found in _KEYS.items() if re.match(pattern, model) for key in found]
  return [command, "--json", f"model_name={model}", *_ARGUMENTS[command], *keys]


def measure(command: str, model: str, keep: pathlib.Path | None = None) -> dict[str, Any]:
  """Runs a command; returns its CPU seconds, its exit code, and whether it failed by an exception of Python.

  Args:
    command: a subcommand of `maxtext-pp`.
    model: the name of a model.
    keep: a folder for what the command prints.
  """
  with tempfile.TemporaryDirectory() as folder:
    printed = (keep or pathlib.Path(folder)) / f"{command}-{model}.txt"
    before = os.times()
    with printed.open("w", encoding="utf-8") as file:
      line = [sys.executable, "-m", "maxtext_pp_ext.cli", *arguments(command, model)]
      done = subprocess.run(line, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, check=False)
    after = os.times()
    crashed = "Traceback (most recent call last)" in printed.read_text(encoding="utf-8")
  seconds = after.children_user + after.children_system - before.children_user - before.children_system
  return {"cpu_s": round(seconds, 2), "exit_code": done.returncode, "crashed": crashed}


def report(results: Mapping[str, Mapping[str, Any]], versions: Mapping[str, str]) -> str:
  """Returns the table, the slowest models first."""
  slowest_first = sorted(results.items(), key=lambda item: -max(each["cpu_s"] for each in item[1].values()))
  rows = [
      (model, *(cell for command in LIMITS for cell in _cells(command, of.get(command)))) for model, of in slowest_first
  ]
  lines = [
      "# CPU seconds of the commands that compile nothing",
      "",
      "`python -m benchmarks.commands` printed this. Each command ran once with `--json`, the arguments below, and the "
      "keys without which MaxText refuses the model. Importing JAX and MaxText takes 4 to 5 s of each. Other load on the "
      "machine makes CPU seconds longer, too. Models that no run has measured are not listed. Versions: "
      f"{', '.join(f'{package} {version}' for package, version in versions.items())}.",
      "",
      *(f"- {each}: `{' '.join(_ARGUMENTS[each])}`; *: more than {limit:.0f} s" for each, limit in LIMITS.items()),
      "",
      tables.markdown(_HEADER, rows),
  ]
  return "\n".join(lines) + "\n"


def _cells(command: str, result: Mapping[str, Any] | None) -> tuple[str, str]:
  if result is None:
    return tables.MISSING, ""
  star = " *" if result["cpu_s"] > LIMITS[command] else ""
  code = result["exit_code"]
  # Python's exit code after an exception is that of "nothing fits".
  words = "crashed" if result.get("crashed") else _EXIT_CODES.get(code, f"exit code {code}")
  return f"{tables.number(result['cpu_s'])}{star}", words


def main(argv: Sequence[str] | None = None) -> None:
  parser = argparse.ArgumentParser(
      prog="python -m benchmarks.commands", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--models", nargs="+", choices=models(), default=models(), metavar="NAME", help="only these")
  parser.add_argument("--commands", nargs="+", choices=tuple(LIMITS), default=tuple(LIMITS), help="only these commands")
  parser.add_argument("--keep", type=pathlib.Path, metavar="FOLDER", help="a folder for what the commands print")
  parser.add_argument("--output", type=pathlib.Path, default=compile_step.RESULTS / "commands")
  options = parser.parse_args(argv)
  if options.keep:
    options.keep.mkdir(parents=True, exist_ok=True)
  file = options.output.with_suffix(".json")
  versions, old = compile_step.versions(), tables.read(file)
  results = old.get("models", {}) if old.get("versions") == versions else {}
  for command, model in track([(command, model) for model in options.models for command in options.commands]):
    results[model] = results.get(model, {}) | {command: measure(command, model, options.keep)}
    tables.write(file, {"versions": versions, "models": results})
  text = report(results, versions)
  options.output.with_suffix(".md").write_text(text, encoding="utf-8")
  print(text)


if __name__ == "__main__":
  main()

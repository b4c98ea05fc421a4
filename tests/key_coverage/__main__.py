# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.key_coverage` sweeps the table's keys, and writes what agrees into tests/key_coverage/swept.

Each version of MaxText has its own file; a run uses the version of its environment.

Takes a few hours on two cores. It begins with the configurations of these files, keeps trained runs in --folder, and
resumes where it was ended. Values of configurations that did not agree are drawn again, one at a time. The exit code is 1
if a configuration differs or fails, or a value was not trained.
"""

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
import concurrent.futures
import dataclasses
import itertools
import json
import pathlib
import shutil
import sys
from typing import Any

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from maxtext_pp_ext.host.patch_points import version
from tests import conftest  # noqa: F401  (the environment of the tests, compiled programs kept)
from tests.key_coverage import sweep, table
from tests.key_coverage.sweep import Configuration, Outcome

CHECKOUT = pathlib.Path(__file__).resolve().parents[2]
SWEPT = pathlib.Path(__file__).resolve().parent / "swept"
_CHUNK = 6  # configurations that one process trains
_ROUNDS = 4


def main(argv: list[str] | None = None) -> int:
  """Runs the command; returns its exit status."""
  parser = argparse.ArgumentParser(
      prog="python -m tests.key_coverage", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument(
      "--folder", type=pathlib.Path, default=CHECKOUT / ".cache" / "key-coverage", help="where runs are kept"
  )
  parser.add_argument("--workers", type=int, default=2, help="processes that train at the same time")
  parser.add_argument("--keys", nargs="+", metavar="KEY", help="only these keys")
  parser.add_argument("--models", nargs="+", choices=table.MODELS, default=table.MODELS, help="only these models")
  parser.add_argument("--most", type=int, default=sys.maxsize, help="train at most so many configurations, and stop")
  options = parser.parse_args(argv)
  console, folder = Console(), options.folder.resolve()
  folder.mkdir(parents=True, exist_ok=True)
  swept = swept_file(version.found_version())
  known, defaults = read(swept) | read(folder / "outcomes.jsonl"), defaults_of_models()
  for number, chosen in enumerate(_rounds(known, defaults, options.keys, options.models)):
    chosen = dict(itertools.islice(chosen.items(), max(options.most, 0)))
    options.most -= len(chosen)
    if not chosen:
      continue
    console.print(f"round {number + 1}: {len(chosen)} configurations")
    _train(chosen, folder, known, options.workers, console)
  bad = [item for item in known.values() if item[1].verdict not in (sweep.AGREES, sweep.HOST_FAILS, sweep.REFUSED)]
  missing = [f"{e.key}={v}" for e, v in sweep.values_to_draw(defaults) if not _is_covered(known, e.key, v)]
  agree = [configuration for configuration, outcome in known.values() if outcome.verdict == sweep.AGREES]
  console.print(f"{len(agree)} configurations agree, {len(bad)} do not; values without one that agrees: {len(missing)}")
  for text in missing:
    console.print(f"  {text}", markup=False)
  if options.keys is None:
    SWEPT.mkdir(exist_ok=True)
    write(swept, {name: item for name, item in known.items() if item[1].verdict == sweep.AGREES})
  return 1 if bad or missing else 0


def _rounds(
    known: Mapping, defaults: Mapping[str, Any], keys: Iterable[str] | None, models: Sequence[str]
) -> Iterator[dict[str, Configuration]]:
  """The configurations of each round: groups first, then single values of groups that did not agree, then more groups."""
  for seed in range(_ROUNDS):
    covered = {item for c, o in known.values() if o.verdict == sweep.AGREES for item in _items(c)}
    if keys is not None:
      covered |= {(e.key, repr(v)) for e, v in sweep.values_to_draw(defaults) if e.key not in keys}
    drawn = sweep.draw(defaults, covered, seed, sweep.GROUP if seed == 0 else 1, models)
    yield _named(drawn, known, sys.maxsize)
  for seed in itertools.count(_ROUNDS):
    agree = sum(outcome.verdict == sweep.AGREES for _, outcome in known.values())
    if agree >= sweep.ENOUGH or keys is not None or seed > 2 * _ROUNDS:
      return
    yield _named(sweep.draw(defaults, set(), seed, models=models), known, sweep.ENOUGH - agree)


def _named(drawn: Iterable[Configuration], known: Mapping, most: int) -> dict[str, Configuration]:
  """The configurations that have not been trained, under new names."""
  tried = [configuration for configuration, _ in known.values()]
  new = itertools.islice((configuration for configuration in drawn if configuration not in tried), most)
  first = 1 + max(map(int, known), default=-1)
  return {f"{number:04}": configuration for number, configuration in enumerate(new, start=first)}


def _items(configuration: Configuration) -> list[tuple[str, str]]:
  return [(key, repr(configuration.keys[key])) for key in configuration.drawn if sweep.has_effect(key, configuration)]


def _is_covered(known: Mapping, key: str, value: Any) -> bool:
  return any((key, repr(value)) in _items(c) for c, outcome in known.values() if outcome.verdict == sweep.AGREES)


def _train(chosen: Mapping, folder: pathlib.Path, known: dict, workers: int, console: Console) -> None:
  """Trains configurations in chunks, and writes each outcome as soon as it is known."""
  names = list(chosen)
  chunks = [names[i : i + _CHUNK] for i in range(0, len(names), _CHUNK)]
  columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
  with Progress(*columns, console=console) as progress, concurrent.futures.ThreadPoolExecutor(workers) as pool:
    task = progress.add_task("trained", total=len(names))

    def begin(chunk: list[str]) -> concurrent.futures.Future:
      place = folder / chunk[0]
      shutil.rmtree(place, ignore_errors=True)
      place.mkdir()
      sweep.write_text(place)
      return pool.submit(sweep.train, place, {name: chosen[name] for name in chunk})

    try:
      for done in concurrent.futures.as_completed([begin(chunk) for chunk in chunks]):
        for name, outcome in done.result().items():
          known[name] = chosen[name], outcome
          if outcome.verdict != sweep.AGREES:
            console.print(f"{name} {outcome.verdict} ({outcome.ratio:.1f}): {_words(chosen[name])}", markup=False)
            console.print(f"    {outcome.said}", markup=False)
        write(folder / "outcomes.jsonl", known)
        progress.advance(task, len(done.result()))
    finally:
      pool.shutdown(cancel_futures=True)


def _words(configuration: Configuration) -> str:
  keys = " ".join(table.arguments(configuration.keys))
  return f"{configuration.model}, {configuration.stages} stages, {configuration.pipeline_impl}: {keys}"


def swept_file(of_version: str) -> pathlib.Path:
  """The file of the configurations that agreed with a version of MaxText."""
  return SWEPT / f"maxtext-{of_version}.jsonl"


def read(file: pathlib.Path) -> dict[str, tuple[Configuration, Outcome]]:
  """Configurations and their outcomes by name, from a file that `write` wrote; empty if there is no file."""
  if not file.exists():
    return {}
  found = {}
  for line in file.read_text(encoding="utf-8").splitlines():
    values = json.loads(line)
    outcome = Outcome(**{field.name: values.pop(field.name) for field in dataclasses.fields(Outcome)})
    name = values.pop("name")
    found[name] = Configuration(**values | {"drawn": tuple(values["drawn"])}), outcome
  return found


def write(file: pathlib.Path, known: Mapping[str, tuple[Configuration, Outcome]]) -> None:
  lines = [
      json.dumps({"name": name, **dataclasses.asdict(configuration), **dataclasses.asdict(outcome)}, sort_keys=True)
      for name, (configuration, outcome) in sorted(known.items())
  ]
  file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def defaults_of_models() -> dict[str, Any]:
  """The value of each key in configurations that do not set it, in the first model in which the key is drawn."""
  from maxtext_pp_ext.host.models import run_config  # pylint: disable=import-outside-toplevel
  from maxtext_pp_ext.host.patch_points import install  # pylint: disable=import-outside-toplevel

  install.install()
  from maxtext.configs import types  # pylint: disable=import-outside-toplevel

  configs = {}
  for model in table.MODELS:
    configuration = Configuration(model=model, stages=1, pipeline_impl="host", keys={}, drawn=())
    configs[model] = run_config.read_without_run(configuration.weights())
  has = types.MaxTextConfig.model_fields
  return {key: getattr(configs[e.models[0]], key, None) for key, e in table.entries().items() if key in has}


def trained() -> set[str]:
  """Keys that agreed at two values or more with the newest MaxText."""
  swept = [configuration for configuration, _ in read(swept_file("0.2.5")).values()]
  held = sweep.held(swept, defaults_of_models()) if swept else {}
  return {key for key, values in held.items() if len(values) > 1}


if __name__ == "__main__":
  sys.exit(main())

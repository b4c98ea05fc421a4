# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Draws configurations from the table, and trains each with a pipeline and without.

A configuration is a model, a number of stages, an implementation, and a group of keys at other values than their
defaults. It is trained three times by MaxText's trainer on real text, packed, with equal weights in float32: without a
pipeline, without one from weights that are moved by rounding (the twin), and with the pipeline. Every metric that a run
writes has to agree within what rounding does to the twin; see `tests.trainer.cases`, whose bounds these are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
import dataclasses
import itertools
import json
import math
import pathlib
import random
import re
from typing import Any

from maxtext_pp_ext import registry
from maxtext_pp_ext.trainer_runs import trainer
from tests.key_coverage import table
from tests.trainer import cases
from tests.trainer.runs import Results, Run, run_all

DEVICES = 12
STEPS = 4
LAYERS = 6
STAGES = (2, 3)
MICROBATCHES = {2: 4, 3: 3}
IMPLEMENTATIONS = tuple(name for name in registry.names() if name != registry.HOST)
GROUP = 4  # keys that are drawn together
ENOUGH = 150  # configurations

AGREES, DIFFERS, REFUSED, FAILS, HOST_FAILS = "agrees", "differs", "refused", "fails", "fails without a pipeline"

MODELS: dict[str, dict[str, Any]] = {
    "dense": cases.MODELS["dense"],
    "moe": cases.MODELS["moe"],
    "deepseek": {
        **{key: value for key, value in cases.MORE_MODELS["indexer"].items() if "indexer" not in key},
        "base_num_decoder_layers": LAYERS + 1,
    },
}
_OTHERS = {
    "base_num_decoder_layers": LAYERS,
    "steps": STEPS,
    "eval_interval": -1,
    "ici_fsdp_parallelism": -1,
    "grain_train_files": "data/text.array_record",
    "grain_eval_files": "data/text.array_record",
    "tokenize_train_data": False,
    "tokenize_eval_data": False,
    "packing": True,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Configuration:
  """One comparison; `keys` are the drawn keys and the keys that these need."""

  model: str
  stages: int
  pipeline_impl: str
  keys: Mapping[str, Any]
  drawn: tuple[str, ...]

  def runs(self, name: str) -> dict[str, Run]:
    """The runs of a configuration by name: without a pipeline, the twin of that run, and with a pipeline."""
    pipeline = {
        "ici_pipeline_parallelism": self.stages,
        "num_pipeline_microbatches": MICROBATCHES[self.stages],
        "pipeline_impl": self.pipeline_impl,
    }
    alone, rounding = self._arguments({}), STEP if self.keys.get("quantization") else ROUNDING[self.rounds_to]
    return {
        f"{name}_none": Run(keys=alone, weights=name),
        f"{name}_twin": Run(keys=alone, weights=name, rounding=rounding),
        f"{name}_pipeline": Run(keys=self._arguments(pipeline), weights=name),
    }

  def weights(self) -> Sequence[str]:
    """MaxText's keys of the model whose initial weights all runs use."""
    return self._arguments({})

  @property
  def rounds_to(self) -> str:
    return next((dtype for dtype in ROUNDING if dtype in self.keys.values()), "float32")

  def _arguments(self, pipeline: Mapping[str, Any]) -> list[str]:
    return table.arguments(
        cases.SHARED | MODELS[self.model] | _without(_OTHERS, MODELS[self.model]) | pipeline | self.keys
    )


def _without(keys: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
  return {key: value for key, value in keys.items() if key not in others}


# By how much of itself a weight is moved: as `tests.trainer.cases.ROUNDING`, four times the unit roundoff.
ROUNDING = {"bfloat16": 2.0**-7, "float32": cases.ROUNDING}
# With quantization: a value that is rounded to few bits moves by a whole step or not at all, and a step is much. By so
# much of itself a weight is moved that some values do move, as they do by the rounding of another order of sums.
STEP = 2.0**-14


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
  """The result of a configuration: a verdict, the largest ratio of a difference to its bound, and the place of it."""

  verdict: str
  ratio: float = 0.0
  said: str = ""


def draw(
    defaults: Mapping[str, Any],
    covered: set,
    seed: int,
    group: int = GROUP,
    models: Sequence[str] = table.MODELS,
) -> Iterator[Configuration]:
  """Configurations that hold every value of every key that is not its default, and not covered.

  Args:
    defaults: the keys that this MaxText has, with their values where no configuration sets them.
    covered: (key, repr of the value) that need not be drawn.
    seed: seed of the groups.
    group: number of keys that are drawn together.
    models: the models to draw.
  """
  numbers = random.Random(seed)
  left = [item for item in values_to_draw(defaults) if (item[0].key, repr(item[1])) not in covered]
  numbers.shuffle(left)
  left = [item for item in left if not set(models).isdisjoint(item[0].models)]
  places = list(itertools.product(models, STAGES, IMPLEMENTATIONS))
  numbers.shuffle(places)
  for model, stages, implementation in itertools.cycle(places):
    if not left:
      return
    keys, drawn = {}, []
    for item in list(left):
      entry, value = item
      if len(drawn) < group and model in entry.models and _fits(entry, value, keys, drawn, stages):
        keys |= {**entry.with_keys, entry.key: value}
        drawn.append(entry)
        left.remove(item)
    if drawn:
      names = tuple(entry.key for entry in drawn)
      yield Configuration(model=model, stages=stages, pipeline_impl=implementation, keys=keys, drawn=names)


def values_to_draw(defaults: Mapping[str, Any]) -> list[tuple[table.Entry, Any]]:
  return [
      (entry, value)
      for entry in table.entries().values()
      for value in entry.equal
      if {entry.key, *entry.with_keys} <= defaults.keys() and not same(value, defaults[entry.key])
  ]


def same(value: Any, other: Any) -> bool:
  """Whether two values of a key are the same; enums are their values."""
  plain = lambda x: getattr(x, "value", x)
  value, other = plain(value), plain(other)
  if isinstance(value, str) or isinstance(other, str):
    return str(value) == str(other)
  empty = lambda x: x is None or x == []
  return value == other or (empty(value) and empty(other))


def _fits(entry: table.Entry, value: Any, keys: Mapping[str, Any], drawn: Sequence[table.Entry], stages: int) -> bool:
  new = {**entry.with_keys, entry.key: value}
  if LAYERS % (stages * new.get("num_layers_per_pipeline_stage", 1)):
    return False
  if any(key in keys and keys[key] != wanted for key, wanted in new.items()):
    return False
  if any(key in keys for key in entry.not_with):
    return False
  return not any(key in new for other in drawn for key in other.not_with)


def train(folder: pathlib.Path, configurations: Mapping[str, Configuration]) -> dict[str, Outcome]:
  """Trains configurations, by name, in processes with virtual devices, in a folder that has the text.

  The twin is trained only if a run with a pipeline is further off than the rounding of its weights explains by itself.
  """
  weights = {name: configuration.weights() for name, configuration in configurations.items()}
  of = lambda names, *kinds: {
      run: plan
      for name in names
      for run, plan in configurations[name].runs(name).items()
      if run.removeprefix(f"{name}_") in kinds
  }
  results = _run(folder, of(configurations, "none", "pipeline"), weights)
  found = {name: outcome(results, name, configuration) for name, configuration in configurations.items()}
  far = [name for name, each in found.items() if each.verdict == DIFFERS and math.isfinite(each.ratio)]
  if far:
    results = _run(folder, of(far, "twin"), weights)
    found |= {name: outcome(results, name, configurations[name]) for name in far}
  return found


def _run(folder: pathlib.Path, runs: Mapping[str, Run], weights: Mapping[str, Sequence[str]]) -> Results:
  try:
    return run_all(folder, runs, devices=DEVICES, weights=weights)
  except trainer.RunFailedError:  # the process has died; what it has trained counts
    return Results(folder)


_ERROR = re.compile(r"[\w.]+(Error|Exception|Exit): ")  # how the last line of a traceback begins


def outcome(results: Results, name: str, configuration: Configuration) -> Outcome:
  """The verdict on a trained configuration."""
  found: dict[str, list[dict[str, float]]] = {}
  for kind in ("none", "pipeline", *(["twin"] if results.metrics_files(f"{name}_twin") else [])):
    try:
      found[kind] = [_values(line) for line in results.metrics(f"{name}_{kind}")]
    except trainer.RunFailedError as error:
      lines = str(error).strip().splitlines()
      text = next((line for line in reversed(lines) if _ERROR.match(line)), lines[-1])
      verdict = (
          HOST_FAILS if kind != "pipeline" else REFUSED if "with the pipeline configuration" in str(error) else FAILS
      )
      return Outcome(verdict=verdict, said=text if verdict != REFUSED else str(error)[-1500:])
  return compare(found["none"], found.get("twin", found["none"]), found["pipeline"], ROUNDING[configuration.rounds_to])


def _values(line: Mapping[str, float]) -> dict[str, float]:
  """The numbers that a step or evaluation reports, except times."""
  is_time = lambda key: key.startswith("perf/") or "step_time" in key
  return {key: value for key, value in line.items() if isinstance(value, int | float) and not is_time(key)}


# Metrics that are smaller count as this large: below, it is the rounding of what they are a difference of.
LEAST = 1e-3
# These must not be 0 without a pipeline: a model that is not trained would agree with any other.
TRAINED = cases.TRAIN_METRICS


def compare(
    expected: Sequence[Mapping[str, float]],
    twin: Sequence[Mapping[str, float]],
    found: Sequence[Mapping[str, float]],
    rounding: float,
) -> Outcome:
  """Compares every metric of every step."""
  if [line.keys() for line in expected] != [line.keys() for line in found]:
    names = [sorted(set().union(*lines)) for lines in (expected, found)]
    return Outcome(verdict=DIFFERS, ratio=math.inf, said=f"other metrics or steps: {names}")
  if nothing := {name for line in expected for name in TRAINED if line.get(name) == 0}:
    return Outcome(verdict=HOST_FAILS, said=f"{', '.join(sorted(nothing))} is 0 without a pipeline: nothing is trained")
  drift: dict[str, float] = {}
  worst = Outcome(verdict=AGREES)
  for step, lines in enumerate(zip(expected, twin, found, strict=True)):
    for name, value in lines[0].items():
      near, ours = (abs(line[name] - value) / max(abs(value), LEAST) for line in lines[1:])
      drift[name] = max(drift.get(name, rounding), near)
      ratio = ours / (cases.SAMPLES * drift[name])
      if not ratio <= worst.ratio:
        said = f"{name} of step {step}: {lines[2][name]:.9g}, without a pipeline {value:.9g}"
        worst = Outcome(verdict=AGREES if ratio <= 1 else DIFFERS, ratio=ratio, said=said)
  return worst


_CHARACTERS = " etaoinsrhldcumfpgwybvkxjqz\n.,()`'\"_:-=*/0123456789[]{}<>#+"


def write_text(folder: pathlib.Path) -> None:
  """Writes Python's own documentation, one token per character, in pieces of random length, and its tokenizer."""
  from pydoc_data.topics import topics  # pylint: disable=import-outside-toplevel

  cases.write_tokenizer(folder / "tokenizer")
  numbers, pieces = random.Random(0), []
  text = "\n".join(topics[name] for name in sorted(topics)).lower()[:60_000]
  at = 0
  while at < len(text):
    length = numbers.randint(4, cases.LONGEST)
    pieces.append(
        [4 + max(_CHARACTERS.find(character), 0) % (cases.VOCABULARY - 4) for character in text[at : at + length]]
    )
    at += length
  trainer.write_records(folder / "data" / "text.array_record", ({"text": ids} for ids in pieces))
  # For dataset_type=hf: the words that the tokenizer makes these tokens of.
  lines = (json.dumps({"text": " ".join(f"w{token}" for token in ids)}) for ids in pieces)
  (folder / "data" / "text.jsonl").write_text("\n".join(lines), encoding="utf-8")


def has_effect(key: str, configuration: Configuration) -> bool:
  """Whether a configuration has the default of a key, or what the key's entry says that another value needs."""
  return key not in configuration.keys or table.entries()[key].with_keys.items() <= configuration.keys.items()


def held(configurations: Iterable[Configuration], defaults: Mapping[str, Any]) -> dict[str, list[Any]]:
  """The values of each key in these configurations."""
  found: dict[str, list[Any]] = {key: [] for key, entry in table.entries().items() if entry.equal}
  for configuration in configurations:
    for key, values in found.items():
      value = configuration.keys.get(key, defaults.get(key))
      if has_effect(key, configuration) and not any(same(value, other) for other in values):
        values.append(value)
  return found

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The table of `maxtext-pp plan`, the keys of its rows, and what would make a model fit."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
import shutil
import textwrap
from typing import Any

from maxtext_pp_ext import units
from maxtext_pp_ext.config.remedies import value_text
from maxtext_pp_ext.plan.costs import Part, Sent

_WIDTH = 80  # without a terminal
_BETWEEN = "  "
# Keys that are set by options here.
_OPTIONS = {"internal_compile_num_devices": "--devices "}
# Column -> parts of the memory that it adds up. Together they are all of it.
MEMORY = {
    "state": (Part.PARAMETERS, Part.MOMENTS, Part.GRADIENTS),
    "window": (
        *(Part.WINDOW, Part.ALL_WEIGHTS, Part.WEIGHTS_OF_ITERATION, Part.WEIGHTS_OF_LAYER, Part.WEIGHTS_AT_LOGITS),
        *(Part.SUMS, Part.UNREDUCED, Part.GRADIENTS_OF_LAYER, Part.GRADIENTS_BEHIND),
    ),
    "kept": (Part.KEPT,),
    "work": (Part.WAITING, Part.WORK, Part.WORK_OF_LAYER, Part.OUTPUTS, Part.HEAD, Part.LOGITS),
}
# Column -> parts of what is sent that it adds up. Together they are all of it.
SENT = {
    "weights": (Sent.WEIGHTS, Sent.GRADIENTS),
    "act.": (Sent.ACTIVATIONS,),
    "outside": (Sent.OUTSIDE,),
    "tokens": (Sent.DISPATCH,),
}
# A plan chooses it if the run does not.
_EXPERTS = "ici_expert_parallelism"
# What MaxText takes if a run does not say otherwise. An axis with -1 takes what is left.
_DEFAULTS = {"num_layers_per_pipeline_stage": 1, "num_pipeline_microbatches": -1}


def show(result: dict[str, Any], found: Any, given: Mapping[str, Any], wide: bool) -> None:
  """Prints a plan.

  Args:
    result: what `--json` prints.
    found: a `plan.candidates.Plan`.
    given: the run's own keys.
    wide: whether the table has all columns, however wide it gets.
  """
  width = shutil.get_terminal_size((_WIDTH, 24)).columns
  say = lambda line, indent="": print(textwrap.fill(line, width, subsequent_indent=indent, break_on_hyphens=False))
  limit = f" of {units.bytes_text(result['device_memory'])}" if result["device_memory"] else ""
  rows = result["candidates"]
  say(f"{units.counted(result['devices'], 'device')}{limit}: {_how_many(result, found)}")
  if rows:
    shown = {
        "EP": any(_EXPERTS in row["keys"] for row in rows),
        "tokens": any(Sent.DISPATCH in row["sent"]["bytes"] for row in rows),
    }
    columns = [name for name in _COLUMNS if (wide or name in _NARROW) and shown.get(name, True)]
    for line in _table(rows, {name: _COLUMNS[name] for name in columns}):
      print(line)
  if not wide and rows:
    say("(--wide shows more columns, --help says what they are)")
  if about_slices := _slices(found, given):
    say(about_slices)
  for line in _ways(result, found):
    say(line, "    ")
  if rows:
    print("keys of each row:")
  for i, row in enumerate(rows, start=1):  # lines to copy: they are not broken
    print(f"  {i}: {' '.join(f'{key}={value}' for key, value in _keys_to_set(row, given).items())}")
  if result["not_estimated"]:
    say("not estimated, in none of them: " + "; ".join(result["not_estimated"]))
  for line in _compiled(rows, result.get("order")):
    say(line, "    ")
  if "written" in result:
    print(f"wrote {result['written']}: check it with: maxtext-pp check {result['written']}")
  if "not_written" in result:
    say(result["not_written"])
  for each in result.get("infeasible", ()):
    say(f"cannot be: {' '.join(f'{key}={value}' for key, value in each['keys'].items())}: {each['reason']}", "    ")


def _slices(found: Any, given: Mapping[str, Any]) -> str | None:
  """Returns which slices the seconds are of, if the run does not say it, or why there are no seconds."""
  from maxtext_pp_ext.hardware import chips  # pylint: disable=import-outside-toplevel
  from maxtext_pp_ext.host import topology  # pylint: disable=import-outside-toplevel

  if found.chip is None:
    return f"no seconds, since the kind of the devices is not known: give --chip {', '.join(chips.CHIPS)}"
  kind, size = found.chip.name, found.devices // found.num_slices
  if found.slice is None:
    others = " and ".join(topology.nearest(kind, size))
    return f"no seconds, since MaxText has no slice of {units.counted(size, 'device')} of {kind}; it has {others}"
  if found.slice.name == given.get("compile_topology"):
    return None
  return f"seconds are those of {found.slice.name}: {topology.chips(found.slice.name)}"


def _how_many(result: dict[str, Any], found: Any) -> str:
  all_of_them, shown = units.counted(len(found.candidates), "way") + " to run the model", len(result["candidates"])
  fits = sum(map(found.fits, found.candidates))
  if shown == len(found.candidates):
    return f"{all_of_them}, {fits} of them fit" if result["device_memory"] else all_of_them
  if not fits:
    return f"{all_of_them}; none of them fits, the nearest {shown} are shown"
  fitting = f", {fits} of them fit" if result["device_memory"] else ""
  return f"{all_of_them}{fitting}. Of those with the same implementation and stages the best is shown; --all shows all."


def _ways(result: dict[str, Any], found: Any) -> Iterator[str]:
  """Yields what would make the model fit; nothing if it fits."""
  if "ways" not in result or not result["device_memory"]:
    return
  if result["candidates"]:
    missing = result["candidates"][0]["memory"]["total"] - result["device_memory"]
    yield f"the first lacks {units.bytes_text(missing)} per device; with other keys, each estimated:"
  for way in found.ways:
    keys = ", ".join(
        f"{_OPTIONS.get(key, f'{key}=')}{value_text(value)} (now {_now(way.before[key])})"
        for key, value in way.keys.items()
    )
    ends = f"lacks {units.bytes_text(way.missing)}" if way.missing else "fits"
    yield f"  {keys}: {units.bytes_text(way.memory)}, {ends}"
  yield "  remat_policy=full, which keeps least, is assumed. What offloading to the host saves is not estimated."


def _now(value: Any) -> str:
  return "not set" if value in (None, "") else value_text(value)


def _table(rows: Sequence[dict[str, Any]], columns: Mapping[str, Callable[[dict[str, Any]], str]]) -> Iterator[str]:
  """Yields a heading and a line for each row; the first columns are numbers of rows, and words."""
  cells = [[str(i), *(cell(row) for cell in columns.values())] for i, row in enumerate(rows, start=1)]
  headings = ["", *columns]
  widths = [max(map(len, column)) for column in zip(headings, *cells, strict=True)]
  rule = "─" * (sum(widths) + len(_BETWEEN) * (len(widths) - 1))
  yield rule
  for i, line in enumerate([headings, *cells]):
    texts = (f"{text:{'<' if j == 1 else '>'}{width}}" for j, (text, width) in enumerate(zip(line, widths, strict=True)))
    yield _BETWEEN.join(texts).rstrip()
    if not i:
      yield rule
  yield rule


def _bytes(what: str, parts: Collection[str]) -> Callable[[dict[str, Any]], str]:
  return lambda row: units.bytes_text(sum(size for part, size in row[what]["bytes"].items() if part in parts))


def _seconds(key: str) -> Callable[[dict[str, Any]], str]:
  return lambda row: "–" if row[key] is None else f"{row[key]:.3g} s"


def _stages(row: dict[str, Any]) -> str:
  """Returns the number of stages; 4=2×2 means 2 within a slice, on 2 slices."""
  ici, dcn = (row["keys"].get(f"{network}_pipeline_parallelism", 1) for network in ("ici", "dcn"))
  return str(ici) if dcn == 1 else f"{ici * dcn}={ici}×{dcn}"


def _room(row: dict[str, Any]) -> str:
  if row["fits"]:
    return " ?" if row["nearly_full"] else ""
  return " !"


# Column -> what it says of a row.
_COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "pipeline": lambda row: row["impl"],
    "S": _stages,
    "EP": lambda row: str(row["keys"].get(_EXPERTS, 1)),
    "R": lambda row: str(row["repeats"] or "–"),
    "L/S": lambda row: str(row["layers_per_stage"]),
    "M": lambda row: str(row["microbatches"] or "–"),
    "bubble": lambda row: f"{row['bubble_fraction']:.1%}",
    "memory": lambda row: units.bytes_text(row["memory"]["total"]) + _room(row),
    **{name: _bytes("memory", parts) for name, parts in MEMORY.items()},
    **{name: _bytes("sent", parts) for name, parts in SENT.items()},
    "sent": lambda row: units.bytes_text(row["sent"]["total"]),
    "slices": lambda row: units.bytes_text(size) if (size := row["sent"]["between_slices"]) else "–",
    "step s": _seconds("seconds"),
    "at least": _seconds("seconds_at_least"),
    "at most": _seconds("seconds_at_most"),
    "bound by": lambda row: row["bound_by"] or "–",
}
_NARROW = ("pipeline", "S", "EP", "R", "L/S", "M", "bubble", "memory", "sent", "step s")


def _keys_to_set(row: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the keys that make the run that row: those that its own keys and MaxText's defaults do not have so."""

  def same(key: str, value: Any) -> bool:
    if key in given or not key.endswith("_parallelism"):
      return str(given.get(key, _DEFAULTS.get(key))) == str(value)
    return value in (1, -1)

  kept = {"num_pipeline_microbatches", "num_layers_per_pipeline_stage", "allow_split_physical_axes"}
  of_row = {key: value for key, value in row["keys"].items() if key in kept or key.endswith("_parallelism")}
  differing = {key: value for key, value in of_row.items() if not same(key, value)}
  return {"pipeline_impl": row["keys"]["pipeline_impl"]} | differing


def _compiled(rows: list[dict[str, Any]], order: dict[str, list[str]] | None) -> Iterator[str]:
  for row in rows:
    if (compiled := row.get("compiled")) is None:
      continue
    name = name_of(row["impl"], row["keys"])
    if "failure" in compiled:
      yield f"{name}: not compiled: {compiled['failure']}"
      continue
    pairs = {
        "memory": row["memory"]["total"],
        "sent": row["sent"]["total"],
        "between_slices": row["sent"]["between_slices"],
    }
    texts = []
    if (projected := compiled["seconds"]) and row["seconds"]:
      error = f"{row['seconds'] / projected - 1:+.0%}"
      texts.append(f"step {row['seconds']:.3g} s, projected {projected:.3g} s ({error})")
    for what, predicted in pairs.items():
      if actual := compiled[what]:
        words = f"{what.replace('_', ' ')} {units.bytes_text(predicted)}, compiled {units.bytes_text(actual)}"
        texts.append(f"{words} ({predicted / actual - 1:+.0%})")
    yield f"{name}: {'; '.join(texts)}"
  if order and order["estimated"] == order["projected"]:
    yield "the order by projected seconds is the same"
  elif order:
    yield f"the order by projected seconds is another: {'; '.join(order['projected'])}"


def name_of(impl: str, keys: dict[str, Any], microbatches: int | None = None) -> str:
  """Returns a row in words."""
  stages = keys.get("ici_pipeline_parallelism", 1) * keys.get("dcn_pipeline_parallelism", 1)
  impl += f", experts on {members} devices" if (members := keys.get(_EXPERTS, 1)) > 1 else ""
  if stages == 1:
    return f"{impl}, {microbatches} microbatches" if microbatches and microbatches > 1 else impl
  per_stage = keys["num_layers_per_pipeline_stage"]
  of = f", {units.counted(per_stage, 'layer')}, {units.counted(microbatches, 'microbatch')}" if microbatches else ""
  return f"{impl}, {stages} stages{of}"

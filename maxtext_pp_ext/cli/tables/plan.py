# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""The table of `maxtext-pp plan`, the keys of its rows, and what would make a model fit."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
import functools
import shutil
import textwrap
from typing import Any

from maxtext_pp_ext import units
from maxtext_pp_ext.config.remedies import value_text
from maxtext_pp_ext.hardware import chips
from maxtext_pp_ext.host import topology
from maxtext_pp_ext.plan.costs import BATCH, is_of_policy, OF_POLICIES, Part, Sent

_WIDTH = 80  # without a terminal
_BETWEEN = "  "
# Keys that are set by options here.
_OPTIONS = {"internal_compile_num_devices": "--devices "}
# Column -> parts of the memory that it adds up. Together they are all of it.
MEMORY = {
    "state": (Part.PARAMETERS, Part.MOMENTS, Part.COPIES, Part.GRADIENTS, Part.GRADIENTS_OF_PARTS),
    "gathered": (
        *(Part.DOUBLE_BUFFER, Part.ALL_WEIGHTS, Part.WEIGHTS_OF_ITERATION, Part.WEIGHTS_OF_LAYER, Part.WEIGHTS_AT_LOGITS),
        *(Part.SUMS, Part.UNREDUCED, Part.GRADIENTS_OF_LAYER),
    ),
    "kept": (Part.KEPT, Part.KEPT_AGAIN, Part.TO_HOST),
    "work": (Part.WAITING, Part.WORK, Part.WORK_OF_LAYER, Part.OUTPUTS, Part.HEAD, Part.LOGITS, Part.AFTER_LOGITS),
}
# Column -> parts of what is sent that it adds up. Together they are all of it.
SENT = {
    "weights": (Sent.WEIGHTS, Sent.GRADIENTS),
    "act.": (Sent.ACTIVATIONS,),
    "outside": (Sent.OUTSIDE,),
    "tokens": (Sent.DISPATCH,),
    "layers": (Sent.WITHIN_LAYERS,),
}
_BATCH, _ACCUMULATED = BATCH
# A plan chooses it if the run does not.
_EXPERTS = "ici_expert_parallelism"
# Column -> the key of an axis that a plan chooses.
_AXES = {"TP": "ici_tensor_parallelism", "CP": "ici_context_parallelism", "EP": _EXPERTS}
# What MaxText takes if a run does not say otherwise. An axis with -1 takes what is left.
_DEFAULTS = {"num_layers_per_pipeline_stage": 1, "num_pipeline_microbatches": -1, _ACCUMULATED: 1}


def show(result: dict[str, Any], found: Any, given: Mapping[str, Any], wide: bool) -> None:
  """Prints a plan: `result` is what `--json` prints, and `found` a `plan.result.Plan`.

  `given` has the run's own keys. `wide` says whether the table has all columns, however wide it gets.
  """
  width = shutil.get_terminal_size((_WIDTH, 24)).columns

  def say(line: str, indent: str = "") -> None:
    print(textwrap.fill(line, width, subsequent_indent=indent, break_on_hyphens=False))

  limit = f" of {units.bytes_text(result['device_memory'])}" if result["device_memory"] else ""
  rows = result["candidates"]
  say(f"{units.counted(result['devices'], 'device')}{limit}: {_how_many(result, found)}")
  if rows:
    print(*_table(rows, wide), sep="\n")
    if not wide:
      say("(--wide shows more columns, --help says what they are)")
  for line in _assumed(found, given, of_rows={key for row in rows for key in row["keys"]}):
    say(line)
  if about_slices := _slices(found, given):
    say(about_slices)
  for line in _remedies(result, found):
    say(line, "    ")
  if rows:
    print("keys of each row:")
  for i, row in enumerate(rows, start=1):  # lines to copy: they are not broken
    print(f"  {i}: {_assignments(_keys_to_set(row, given))}")
  if result["not_estimated"]:
    say("not estimated, in none of them: " + "; ".join(result["not_estimated"]))
  for line in _compiled(rows, result.get("order")):
    say(line, "    ")
  if "written" in result:
    print(f"wrote {result['written']}; to check it: maxtext-pp check {result['written']}")
  if "not_written" in result:
    say(result["not_written"])
  for each in result.get("infeasible", ()):
    say(f"cannot be: {_assignments(each['keys'])}: {each['reason']}", "    ")


def _assumed(found: Any, given: Mapping[str, Any], of_rows: Collection[str]) -> Iterator[str]:
  """Yields what the figures are of, as the run says it or MaxText's defaults do, and what is not chosen here.

  `of_rows` are keys that rows have.
  """
  batch = [key for key in (_BATCH, _ACCUMULATED) if key not in of_rows]
  keys = (*batch, "max_target_length", "attention", "compile_xla_flags")
  of = {key: value for key in keys if (value := given.get(key)) not in (None, "", -1)}
  yield f"of a step with {_assignments(of)}"
  kept = {key: given[key] for key in OF_POLICIES if not found.chooses_kept and given.get(key)}
  if found.pinned or kept:
    yield f"as the run says: {_assignments(found.pinned | kept)}"


def _assignments(keys: Mapping[str, Any]) -> str:
  return " ".join(f"{key}={value}" for key, value in keys.items())


def _slices(found: Any, given: Mapping[str, Any]) -> str | None:
  """Returns which slices the seconds are of, if the run does not say it, or why there are no seconds."""
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
  count, shown = len(found.candidates), len(result["candidates"])
  fits = sum(map(found.fits, found.candidates))
  text = f"{units.counted(count, 'way')} to run the model"
  if shown < count and not fits:
    return f"{text}; none of them fits, the nearest {shown} are shown"
  text += f", {fits} of them fit" if result["device_memory"] else ""
  more = ". Of those with the same implementation and stages the best is shown; --all shows all."
  return text + (more if shown < count else "")


def _remedies(result: dict[str, Any], found: Any) -> Iterator[str]:
  """Yields what would make the model fit; nothing if it fits."""
  if "remedies" not in result or not result["device_memory"]:
    return
  if result["candidates"]:
    missing = result["candidates"][0]["missing"]
    lacks = [f"{units.bytes_text(size)} per device" for size in (missing["device"],) if size]
    lacks += [f"{units.bytes_text(size)} of the host's memory for a device" for size in (missing["host"],) if size]
    yield f"the first lacks {' and '.join(lacks)}; with other keys, each estimated:"
  for remedy in found.remedies:
    keys = ", ".join(
        f"{_OPTIONS.get(key, f'{key}=')}{value_text(value)} (now {_now(remedy.before[key])})"
        for key, value in remedy.keys.items()
    )
    fits = "fits, nearly full (?)" if found.nearly_full(remedy.memory) else "fits"
    ends = f"lacks {units.bytes_text(remedy.missing)}" if remedy.missing else fits
    yield f"  {keys}: {units.bytes_text(remedy.memory)}, {ends}"


def _now(value: Any) -> str:
  return "not set" if value in (None, "") else value_text(value)


def _table(rows: Sequence[dict[str, Any]], wide: bool) -> Iterator[str]:
  """Yields a heading and a line for each row; the first columns are numbers of rows, and words."""
  shown = {
      **{column: any(key in row["keys"] for row in rows) for column, key in _AXES.items()},
      "tokens": any(Sent.DISPATCH in row["sent"]["bytes"] for row in rows),
      "layers": any(Sent.WITHIN_LAYERS in row["sent"]["bytes"] for row in rows),
      "batch": any(_BATCH in row["keys"] for row in rows),
      "parts": any(_ACCUMULATED in row["keys"] for row in rows),
  }
  narrow = (*_NARROW, "tokens/s") if shown["batch"] else _NARROW
  columns = {name: cell for name, cell in _COLUMNS.items() if (wide or name in narrow) and shown.get(name, True)}
  cells = [[str(i), *(cell(row) for cell in columns.values())] for i, row in enumerate(rows, start=1)]
  lines = [["", *columns], *cells]
  widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
  rule = "─" * (sum(widths) + len(_BETWEEN) * (len(widths) - 1))
  aligned = [">", "<", *">" * (len(columns) - 1)]
  pattern = _BETWEEN.join(f"{{:{side}{width}}}" for side, width in zip(aligned, widths, strict=True))
  heading, *others = (pattern.format(*line).rstrip() for line in lines)
  yield from (rule, heading, rule, *others, rule)


def _bytes(row: dict[str, Any], *, what: str, parts: Collection[str]) -> str:
  return units.bytes_text(sum(size for part, size in row[what]["bytes"].items() if part in parts))


def _seconds(row: dict[str, Any], *, key: str) -> str:
  return "–" if row[key] is None else f"{row[key]:.3g} s"


def _stages(row: dict[str, Any]) -> str:
  """Returns the number of stages; 4=2×2 means 2 within a slice, on 2 slices."""
  ici, dcn = (row["keys"].get(f"{network}_pipeline_parallelism", 1) for network in ("ici", "dcn"))
  return str(ici) if dcn == 1 else f"{ici * dcn}={ici}×{dcn}"


def _axis(row: dict[str, Any], *, key: str) -> str:
  return str(row["keys"].get(key, 1))


def _of_host(row: dict[str, Any]) -> str:
  return " !" if row["missing"]["host"] else ""


def _memory(row: dict[str, Any]) -> str:
  fits = "" if row["fits"] else " !"
  return units.bytes_text(row["memory"]["total"]) + (" ?" if row["fits"] and row["nearly_full"] else fits)


# Column -> what it says of a row.
_COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "pipeline": "{impl}".format_map,
    "batch": lambda row: f"{row['keys'].get(_BATCH, 1):g}",
    "parts": lambda row: str(row["keys"].get(_ACCUMULATED, 1)),
    "S": _stages,
    **{column: functools.partial(_axis, key=key) for column, key in _AXES.items()},
    "R": lambda row: str(row["repeats"] or "–"),
    "L/S": "{layers_per_stage}".format_map,
    "M": lambda row: str(row["microbatches"] or "–"),
    "bubble": "{bubble_fraction:.1%}".format_map,
    "memory": _memory,
    **{name: functools.partial(_bytes, what="memory", parts=parts) for name, parts in MEMORY.items()},
    **{name: functools.partial(_bytes, what="sent", parts=parts) for name, parts in SENT.items()},
    "sent": lambda row: units.bytes_text(row["sent"]["total"]),
    "slices": lambda row: units.bytes_text(size) if (size := row["sent"]["between_slices"]) else "–",
    "to host": lambda row: (units.bytes_text(row["offloaded"]) + _of_host(row)) if row["offloaded"] else "–",
    "tokens/s": lambda row: "–" if row["tokens_per_s"] is None else f"{row['tokens_per_s']:.0f}",
    "MFU": lambda row: "–" if row["mfu"] is None else f"{row['mfu']:.0%}",
    "step s": functools.partial(_seconds, key="seconds"),
    "at least": functools.partial(_seconds, key="seconds_at_least"),
    "at most": functools.partial(_seconds, key="seconds_at_most"),
    "bound by": lambda row: row["bound_by"] or "–",
}
_NARROW = ("pipeline", "batch", "parts", "S", *_AXES, "R", "L/S", "M", "bubble", "memory", "sent", "step s")


def _keys_to_set(row: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the keys that make the run that row: those that its own keys and MaxText's defaults do not have so."""

  def same(key: str, value: Any) -> bool:
    if key in given or not key.endswith("_parallelism"):
      return str(given.get(key, _DEFAULTS.get(key))) == str(value)
    return value in (1, -1)

  kept = {"num_pipeline_microbatches", "num_layers_per_pipeline_stage", "allow_split_physical_axes", _BATCH, _ACCUMULATED}
  of_row = {key: value for key, value in row["keys"].items() if key in kept or key.endswith("_parallelism")}
  # What only MaxText's own pipelines have, and these refuse.
  of_row |= {key: value for key, value in row["keys"].items() if value is False and given.get(key)}
  differing = {key: value for key, value in of_row.items() if not same(key, value)}
  chosen = {key: value for key, value in row["keys"].items() if value and is_of_policy(key, value)}
  return {"pipeline_impl": row["keys"]["pipeline_impl"]} | differing | chosen


def _compiled(rows: list[dict[str, Any]], order: dict[str, list[str]] | None) -> Iterator[str]:
  for row in rows:
    if compiled := row.get("compiled"):
      failure = compiled.get("failure")
      texts = f"not compiled: {failure}" if failure else "; ".join(_predicted(row, compiled))
      yield f"{name_of(row['impl'], row['keys'])}: {texts}"
  if order and order["estimated"] == order["projected"]:
    yield "the order by projected seconds is the same"
  elif order:
    yield f"the order by projected seconds is another: {'; '.join(order['projected'])}"


def _predicted(row: dict[str, Any], compiled: dict[str, Any]) -> Iterator[str]:
  """Yields what was predicted of a row, beside what its compiled step has."""
  if (projected := compiled["seconds"]) and row["seconds"]:
    yield f"step {row['seconds']:.3g} s, projected {projected:.3g} s ({row['seconds'] / projected - 1:+.0%})"
  sent = row["sent"]
  predicted = {"memory": row["memory"]["total"], "sent": sent["total"], "between_slices": sent["between_slices"]}
  for what, size in predicted.items():
    if actual := compiled[what]:
      error = f"{size / actual - 1:+.0%}"
      yield f"{what.replace('_', ' ')} {units.bytes_text(size)}, compiled {units.bytes_text(actual)} ({error})"


def name_of(impl: str, keys: dict[str, Any], microbatches: int | None = None) -> str:
  """Returns a row in words."""
  stages = keys.get("ici_pipeline_parallelism", 1) * keys.get("dcn_pipeline_parallelism", 1)
  impl += f", batch {keys[_BATCH]:g}" if _BATCH in keys else ""
  impl += f" in {units.counted(keys[_ACCUMULATED], 'part')}" if _ACCUMULATED in keys else ""
  for column, key in _AXES.items():
    impl += f", {column} {size}" if (size := keys.get(key, 1)) > 1 else ""
  if stages == 1:
    return f"{impl}, {microbatches} microbatches" if microbatches and microbatches > 1 else impl
  per_stage = keys["num_layers_per_pipeline_stage"]
  of = f", {units.counted(per_stage, 'layer')}, {units.counted(microbatches, 'microbatch')}" if microbatches else ""
  return f"{impl}, {stages} stages{of}"

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Checks keys that select parameters by regular expressions over their paths.

A pipeline puts the decoder's layers at other paths. A pattern may then select other layers, or none, and MaxText trains
silently. This module builds both models without arrays, and compares layer by layer what a pattern selects in each.
"""

from collections.abc import Iterator, Sequence
import re

from flax import nnx

from maxtext_pp_ext.checkpoint.layout import Layout, Leaf, Path
from maxtext_pp_ext.config.host_keys import HostKeys
from maxtext_pp_ext.config.view import plain, with_values
from maxtext_pp_ext.host.models import layouts
from maxtext_pp_ext.host.models.run_config import as_value_errors

# One layer's part of an array: (number of the layer, name within it). An array of no layer: (None, path).
Part = tuple[int | None, Path]

# Key -> the optimizers that read it (`optimizers/optimizers.py`); () for all. Only distillation reads the last one.
KEYS = {"adamw_mask": ("adamw", "adam_pax"), "trainable_parameters_mask": (), "student_params_to_update": ()}
_MOST_NAMED = 4  # differing arrays, in a message
_NUMBER = "#"  # at the end of a name
# MaxText initialises its optimizer with paths that end in "/value", and updates it with paths that do not.
_ENDS = ("", "/value")


def problems(config: HostKeys) -> list[str]:
  """The problems with a pipelined config's patterns; [] if there are none, or MaxText cannot build the model."""
  given = {key: list(getattr(config, key, None) or ()) for key in KEYS}
  given = {key: of for key, of in given.items() if of and (not KEYS[key] or plain(config.opt_type) in KEYS[key])}
  found = []
  for key, pattern in ((key, pattern) for key, patterns in given.items() for pattern in patterns):
    try:
      re.compile(pattern)
    except (re.error, TypeError) as error:
      found.append(f"{key} has {pattern!r}, which is not a regular expression: {error}.")
  if found or not given:
    return found
  try:
    with as_value_errors("build this model"):
      with_pipeline = layouts.of_config(config, nnx.Param)
      without = layouts.of_config(with_values(config, {"using_pipeline_parallelism": False}), nnx.Param)
  except ValueError as error:
    try:
      layouts.abstract_model_of(config)
    except ValueError:
      return []  # MaxText itself reports a model that it cannot build
    return [f"{key} cannot be checked: {error} Leave it out." for key in given]
  return [text for key, patterns in given.items() for text in differences(key, patterns, with_pipeline, without)]


def differences(key: str, patterns: Sequence[str], with_pipeline: Layout, without: Layout) -> Iterator[str]:
  """Yields a message if patterns, searched for in paths, select other parameters with a pipeline than without."""
  if _selections(patterns, with_pipeline) == _selections(patterns, without):
    return
  unlike = [p for p in patterns if _selections([p], with_pipeline) != _selections([p], without)]
  text = (
      f"{key} has {', '.join(map(repr, unlike))}, which selects other parameters with a pipeline than without: "
      f"{_arrays(patterns, without, with_pipeline)} without, {_arrays(patterns, with_pipeline, without)} with a pipeline."
  )
  # The intended selection of each pattern: that without a pipeline, or that with one if the former is empty.
  wanted = {part for p in patterns for part in _selections([p], without)[0] or _selections([p], with_pipeline)[0]}
  if (proposed := _proposal([p for p in patterns if p not in unlike], wanted, (without, with_pipeline))) is None:
    stacked = next(leaf for layout in (with_pipeline, without) for leaf in layout.leaves if _is_cut(leaf, wanted))
    yield (
        f"{text} No pattern selects the same in both, since {'/'.join(stacked.path)} is one array of layers "
        f"{', '.join(str(layer) for layer, _ in stacked.layers())}. Set {key} so that it selects all of these layers or "
        "none of them, or train without a pipeline."
    )
  else:
    yield f"{text} Set {key}={proposed!r}, which selects the same in both."


def _selections(patterns: Sequence[str], layout: Layout) -> list[set[Part]]:
  """The parts that the patterns select, at updates of the optimizer and at its initialisation."""
  return [{part for leaf in _selected(patterns, layout, end) for part in _parts(leaf)} for end in _ENDS]


def _selected(patterns: Sequence[str], layout: Layout, end: str = "") -> list[Leaf]:
  return [leaf for leaf in layout.leaves if any(re.search(each, "/".join(leaf.path) + end) for each in patterns)]


def _parts(leaf: Leaf) -> Iterator[Part]:
  if leaf.name is None:
    yield None, leaf.path
  else:
    yield from ((layer, leaf.name) for layer, _ in leaf.layers())


def _arrays(patterns: Sequence[str], layout: Layout, other: Layout) -> str:
  """How many arrays one layout selects, and which of them hold parts not selected in the other, as text."""
  selected, elsewhere = _selected(patterns, layout), _selections(patterns, other)[0]
  alone = ["/".join(leaf.path) for leaf in selected if not elsewhere.issuperset(_parts(leaf))]
  more = f" and {len(alone) - _MOST_NAMED} more" if len(alone) > _MOST_NAMED else ""
  named = f" (only there: {', '.join(alone[:_MOST_NAMED])}{more})" if alone else ""
  return f"{len(selected)} array{'s' * (len(selected) != 1)}{named}"


def _is_cut(leaf: Leaf, wanted: set[Part]) -> bool:
  parts = set(_parts(leaf))
  return not wanted.isdisjoint(parts) and not wanted >= parts


def _proposal(kept: list[str], wanted: set[Part], both: Sequence[Layout]) -> list[str] | None:
  """Patterns, `kept` among them, that select `wanted` in both layouts; None if there are none."""
  found = list(kept)
  for layout in both:
    chosen = {leaf.path for leaf in layout.leaves if wanted.issuperset(_parts(leaf))}
    chosen -= {leaf.path for leaf in _selected(kept, layout)}
    found += [p for p in patterns_of(chosen, {leaf.path for leaf in layout.leaves}) if p not in found]
  same = all(selection == wanted for layout in both for selection in _selections(found, layout))
  return found if same else None


def patterns_of(chosen: set[Path], paths: set[Path]) -> list[str]:
  """Regular expressions that select exactly these paths, as few as common prefixes of paths allow.

  Names that differ only in a number at their end, as those of layers do, share one pattern if all of them are chosen.
  """
  families: dict[Path, set[Path]] = {}
  for path in paths:
    families.setdefault(tuple(re.sub(r"(?<=_)\d+$", _NUMBER, part) for part in path), set()).add(path)
  whole = all(family <= chosen or family.isdisjoint(chosen) for family in families.values())
  if whole and families.keys().isdisjoint(name[:end] for name in families for end in range(1, len(name))):
    chosen, paths = {name for name, family in families.items() if family <= chosen}, set(families)
  joined = ("/".join(start) for start in _beginnings((), chosen, paths))
  # Escaped without backslashes, which YAML and Python read differently between quotes.
  escaped = (re.sub(r"[^\w#/]", lambda match: f"[{match[0]}]", each) for each in joined)
  return [f"^{each.replace(_NUMBER, '[0-9]+')}(/|$)" for each in escaped]


def _beginnings(start: Path, chosen: set[Path], paths: set[Path]) -> list[Path]:
  """The shortest prefixes, from `start` on, that only chosen paths have."""
  if not chosen:
    return []
  if start and chosen == paths:
    return [start]
  found = []
  for name in sorted({path[len(start)] for path in paths}):
    below = (*start, name)
    found += _beginnings(below, *({path for path in group if path[: len(below)] == below} for group in (chosen, paths)))
  return found

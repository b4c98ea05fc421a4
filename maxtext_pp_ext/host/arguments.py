# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""What can be said about a run's arguments before MaxText is imported, which takes seconds.

It finds what cannot be right in any run: keys and topologies that do not exist. All else is for MaxText and `rules`.
"""

import ast
from collections.abc import Iterator, Sequence
import re
from types import SimpleNamespace

from maxtext_pp_ext.config.keys import PipelineKeys
from maxtext_pp_ext.host.models import run_config
from maxtext_pp_ext.host.replacements import unknown_keys
from maxtext_pp_ext.host.rules import meshes

_KEY = re.compile(r"\w+(?=\W|$)")


def problems(assignments: Sequence[str]) -> list[str]:
  """Returns a sentence for each key or topology that does not exist.

  Args:
    assignments: `key=value`, as on MaxText's command line.
  """
  return [*_keys(assignments), *_topologies(assignments)]


def _keys(assignments: Sequence[str]) -> Iterator[str]:
  known = {*PipelineKeys.model_fields, *_fields()}
  for key in dict.fromkeys(assignment.partition("=")[0] for assignment in assignments):
    # A dot begins a key within a key.
    name = key.partition(".")[0].partition("[")[0]
    if _KEY.fullmatch(name) and name not in known and len(known) > len(PipelineKeys.model_fields):
      yield unknown_keys.sentence(name, known)


def _fields() -> set[str]:
  """The annotated names in all classes of MaxText's config (types.py); MaxText's keys are among them. {} without any."""
  file = run_config.maxtext_folder() / "configs" / "types.py"
  if not file.is_file():
    return set()
  classes = (node for node in ast.parse(file.read_text(encoding="utf-8")).body if isinstance(node, ast.ClassDef))
  fields = (node.target for each in classes for node in each.body if isinstance(node, ast.AnnAssign))
  return {field.id for field in fields if isinstance(field, ast.Name)}


def _topologies(assignments: Sequence[str]) -> Iterator[str]:
  given = dict(assignment.split("=", 1) for assignment in assignments)
  yield from meshes.unknown_topology(SimpleNamespace(compile_topology=given.get("compile_topology", "")))

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Names and files in a run's arguments that do not exist, found before MaxText is imported, which takes seconds."""

import ast
import collections
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import functools
import os
import pathlib
import re
from typing import Any

from maxtext_pp_ext import registry
from maxtext_pp_ext.config import keys as own_keys
from maxtext_pp_ext.config import remedies
from maxtext_pp_ext.config.keys import PipelineKeys
from maxtext_pp_ext.host.models import run_config
from maxtext_pp_ext.host.replacements import unknown_keys
from maxtext_pp_ext.host.rules import meshes
from maxtext_pp_ext.host.topology import topologies
from maxtext_pp_ext.nearest import did_you_mean

_CONFIGS = "src/maxtext/configs/"  # in MaxText's repository; MaxText finds its own configs by it wherever they are
_MOST_FILES = 20  # based on one another
_TYPES, _DECODER = "configs/types.py", "layers/nnx_decoders.py"  # in MaxText's folder


def problems(argv: Sequence[str]) -> list[str]:
  """A sentence for each name in MaxText's arguments that does not exist, and for each file that is no config."""
  files, assigned = _files(argv), dict(argument.split("=", 1) for argument in argv if "=" in argument)
  own = run_config.base_yml().parent
  of_user = {file: content for file, content in files.items() if not file.is_relative_to(own) and content is not None}
  what = "is no config: a yml file of a run has lines of the form key: value."
  prose = [f"{file} {what}" for file, content in of_user.items() if not isinstance(content, dict)]
  *_, by, base = [None, None, *files]
  if by is not None and base is not None and not base.exists():  # MaxText's error has neither the key nor this file
    where = f"and there is no such file beside it, nor in {own}"
    prose.append(f"{by} has base_config: {files[by]['base_config']}, {where}.")
  of_files = [str(key) for content in of_user.values() if isinstance(content, dict) for key in content]
  values = _merged(files, assigned)
  unknown = meshes.unknown_topology(values.get("compile_topology") or "")
  return [*prose, *_keys([*of_files, *assigned]), *unknown, *_names(values)]


def given(argv: Sequence[str]) -> dict[str, Any] | None:
  """Key -> value of the arguments, as text, and their yml files, without base.yml; None if a file cannot be read."""
  files, assigned = _files(argv), dict(argument.split("=", 1) for argument in argv if "=" in argument)
  return None if any(content is None for content in files.values()) else _merged(files, assigned)


def _merged(files: Mapping[pathlib.Path, Any], assigned: dict[str, Any]) -> dict[str, Any]:
  return dict(collections.ChainMap(assigned, *(content for content in files.values() if isinstance(content, dict))))


def _files(argv: Sequence[str]) -> dict[pathlib.Path, Any]:
  """The yml file and those that it is based on, without base.yml, each with its content; None: not readable."""
  import yaml  # pylint: disable=import-outside-toplevel

  found: dict[pathlib.Path, Any] = {}
  own = run_config.base_yml().parent
  file = yml_file(argv[0]) if argv and "=" not in argv[0] else None
  while file is not None and file not in found and len(found) < _MOST_FILES and file != own / "base.yml":
    found[file] = None
    try:
      found[file] = content = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
      break  # MaxText's error says why
    base = content.get("base_config") if isinstance(content, dict) else None
    beside = file.parent / base if isinstance(base, str) else None
    file = beside if beside is None or os.path.isfile(beside) else own / str(base)
  return found


def yml_file(argument: str) -> pathlib.Path:
  """Where MaxText looks for a yml file of this name."""
  if os.path.isfile(argument):
    return pathlib.Path(argument)
  if argument.startswith(_CONFIGS):
    return run_config.base_yml().parent / argument.removeprefix(_CONFIGS)
  return pathlib.Path("src", argument)


def keys() -> set[str]:
  """The keys of a run, ours and MaxText's, which are among the annotated names in all classes of its config."""
  classes = (node for node in _source(_TYPES).body if isinstance(node, ast.ClassDef))
  fields = (node.target for each in classes for node in each.body if isinstance(node, ast.AnnAssign))
  return {*PipelineKeys.model_fields, *(field.id for field in fields if isinstance(field, ast.Name))}


def choices(key: str) -> list[str]:
  """The values that a key may have; [] if they are not known here."""
  of_keys: dict[str, Callable[[], Iterable[str]]] = {
      "model_name": model_names,
      "compile_topology": topologies,
      "pipeline_impl": registry.names,
      "remat_policy": remat_policies,
  }
  return list(of_keys[key]() if key in of_keys else own_keys.CHOICES.get(key, ()))


def _keys(given_keys: Sequence[str]) -> Iterator[str]:
  known = keys()
  for key in dict.fromkeys(given_keys):
    # A dot begins a key within a key.
    name = key.partition(".")[0].partition("[")[0]
    if (re.fullmatch(r"\w+", name) or " " in name) and name not in known and len(known) > len(PipelineKeys.model_fields):
      yield unknown_keys.sentence(name, known)


@functools.cache
def _source(name: str) -> ast.Module:
  """The source of a file of MaxText's; empty if there is no such file."""
  file = run_config.maxtext_folder() / name
  return ast.parse(file.read_text(encoding="utf-8") if file.is_file() else "")


def model_names() -> list[str]:
  """The values of MaxText's key model_name, in its own order; [] if its config does not list them."""
  for node in _source(_TYPES).body:
    names = [target.id for target in getattr(node, "targets", ()) if isinstance(target, ast.Name)]
    if isinstance(node, ast.Assign) and names == ["ModelName"] and isinstance(node.value, ast.Subscript):
      values = (each.value for each in ast.walk(node.value) if isinstance(each, ast.Constant))
      return [value for value in values if isinstance(value, str)]
  return []


def remat_policies() -> set[str]:
  """The values of MaxText's key remat_policy, read off its decoder's comparisons; {} if it has none."""
  found = set()
  for node in ast.walk(_source(_DECODER)):
    if isinstance(node, ast.Compare) and "remat_policy" in (getattr(node.left, "attr", ""), getattr(node.left, "id", "")):
      constants = (leaf.value for each in node.comparators for leaf in ast.walk(each) if isinstance(leaf, ast.Constant))
      found |= {value for value in constants if isinstance(value, str)}
  return found


def _names(values: Mapping[str, Any]) -> Iterator[str]:
  """A sentence for each unknown name. MaxText fills in those with a "$"."""
  names = {key: value for key, value in values.items() if isinstance(value, str) and "$" not in value}
  model, models = names.get("model_name"), model_names()
  if models and model is not None and model not in models:
    yield f"model_name={model} is none of {len(models)} models of MaxText{did_you_mean(model, models, 5)}"
  try:
    registry.get(names.get("pipeline_impl", registry.HOST))
  except registry.UnknownImplementationError as error:
    yield f"{error} {remedies.LEAVE_OUT}"
  policy, policies = names.get("remat_policy"), remat_policies()
  if policies and policy is not None and policy not in policies and policy.lower() != "none":
    meant = did_you_mean(policy, policies, 3)
    ends = meant if meant != "." else f", which has {', '.join(sorted(policies))}."
    yield f"remat_policy={policy} is no policy of MaxText{ends}"

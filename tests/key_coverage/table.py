# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""`keys.yml`: for each configuration key of MaxText, what it can do to a pipelined model.

An entry has one or more of these, and the first of them that it has is its kind:

  equal      values that the sweep trains with a pipeline and without, and finds equal (`models`: in which of the sweep's
             models; `with`: keys that are set with a value other than the default; `not_with`: keys that are not)
  tests      tests that show the same
  refused    configs that we refuse, and a part of the message
  host       configs that MaxText itself refuses, and a part of the message
  platform   why it cannot be judged on CPU devices, and how a difference would show
  unreached  why it cannot change what the decoder computes or learns
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping
import dataclasses
import functools
import pathlib
from typing import Any

import yaml

FILE = pathlib.Path(__file__).resolve().parent / "keys.yml"
MODELS = ("dense", "moe", "deepseek")
# Kind -> what the documentation calls it.
KINDS = {
    "equal": "for the sweep to train",
    "tests": "tested equal",
    "refused": "refused by maxtext-pp-ext",
    "host": "refused by MaxText",
    "platform": "not to be judged on CPU devices",
    "unreached": "cannot reach the decoder",
}


class TableError(ValueError):
  """The table is malformed; the message names the key."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Refusal:
  """A refused config: keys on top of a config that is accepted, and a part of the message."""

  keys: Mapping[str, Any]
  says: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
  """The entry of a key; see the module's docstring."""

  key: str
  equal: tuple[Any, ...] = ()
  models: tuple[str, ...] = MODELS
  with_keys: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  not_with: tuple[str, ...] = ()
  tests: tuple[str, ...] = ()
  refused: tuple[Refusal, ...] = ()
  host: tuple[Refusal, ...] = ()
  platform: str = ""
  unreached: str = ""

  @property
  def kind(self) -> str:
    return next(kind for kind in KINDS if getattr(self, kind))


_FIELDS = {field.name for field in dataclasses.fields(Entry)} - {"key", "with_keys"} | {"with"}


@functools.cache
def entries() -> Mapping[str, Entry]:
  """The table, by key, in its order.

  Raises:
    TableError: it is not well-formed.
  """
  loaded = yaml.load(FILE.read_text(encoding="utf-8"), Loader=_Loader)
  return {key: _entry(key, fields) for key, fields in loaded.items()}


def _entry(key: str, fields: Mapping[str, Any]) -> Entry:
  if unknown := set(fields) - _FIELDS:
    raise TableError(f"{key}: unknown {', '.join(sorted(unknown))}")
  values = dict(fields)
  values["with_keys"] = values.pop("with", {})
  for name in ("refused", "host"):
    values[name] = tuple(Refusal(**each) for each in values.get(name, ()))
  for name in ("equal", "models", "not_with", "tests"):
    if name in values:
      values[name] = tuple(values[name])
  entry = Entry(key=key, **values)
  if not any(getattr(entry, kind) for kind in KINDS):
    raise TableError(f"{key}: says nothing")
  if entry.equal and len(set(map(repr, entry.equal))) < 2:
    raise TableError(f"{key}: fewer than two values are no comparison")
  if bad := set(entry.models) - set(MODELS):
    raise TableError(f"{key}: unknown models {', '.join(sorted(bad))}")
  return entry


def groups() -> dict[str, str]:
  """The class of MaxText's config that has a key, for each key."""
  from maxtext.configs import types  # pylint: disable=import-outside-toplevel

  fields, found = types.MaxTextConfig.model_fields, {}
  for cls in types.MaxTextConfig.__mro__:
    found = {key: cls.__name__ for key in vars(cls).get("__annotations__", {}) if key in fields} | found
  return found


def counts() -> dict[str, int]:
  """The number of keys of each kind."""
  found = collections.Counter(entry.kind for entry in entries().values())
  return {kind: found[kind] for kind in KINDS}


def markdown(documented: Mapping[str, str], trained: set[str]) -> Iterator[str]:
  """Lines of docs/keys.md, which `make docs` writes: counts, then a row for each key.

  Args:
    documented: keys -> the class of MaxText's config that has it.
    trained: keys that a sweep has trained at two values or more.
  """
  yield "| kind | keys |"
  yield "|---|---|"
  for kind, count in counts().items():
    done = f", {sum(key in trained for key in entries())} of them done" if kind == "equal" else ""
    yield f"| {KINDS[kind]}{done} | {count} |"
  yield f"| all | {len(entries())} |"
  group = None
  for key, entry in entries().items():
    if documented.get(key, group) != group:
      group = documented[key]
      yield from ("", f"## {group}", "", "| key | what it can do to a pipelined model |", "|---|---|")
    yield f"| `{key}` | {'; '.join(_said(entry, trained)).replace('|', chr(92) + '|')} |"


def _said(entry: Entry, trained: set[str]) -> Iterator[str]:
  if entry.equal:
    models = "" if entry.models == MODELS else f" ({', '.join(entry.models)})"
    what = "trained equal" if entry.key in trained else "to be trained by the sweep"
    yield f"{what}: {', '.join(f'`{_text(value)}`' for value in entry.equal)}{models}"
  if entry.tests:
    yield f"tested equal by {', '.join(test.removeprefix('tests/') for test in entry.tests)}"
  for name, who in (("refused", "refused"), ("host", "MaxText refuses")):
    for refusal in getattr(entry, name):
      yield f"{who} `{' '.join(f'{key}={_text(value)}' for key, value in refusal.keys.items())}`"
  if entry.platform:
    yield f"not on CPU devices: {entry.platform.strip()}"
  if entry.unreached:
    yield f"cannot reach the decoder: {entry.unreached.strip()}"


def arguments(keys: Mapping[str, Any]) -> list[str]:
  """MaxText's `key=value` arguments."""
  return [f"{key}={_text(value)}" for key, value in keys.items()]


def _text(value: Any) -> str:
  if isinstance(value, str):
    return value if value else '""'
  return yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix("...\n").strip()


class _Loader(yaml.SafeLoader):
  """Refuses a key that occurs twice; YAML would take the last value."""

  def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
    names = [self.construct_object(key, deep=deep) for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
    if twice := [name for name, count in collections.Counter(names).items() if count > 1]:
      raise TableError(f"{twice[0]} stands twice in {FILE.name}")
    return super().construct_mapping(node, deep)

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Finds the parts of annotations that a resolution did not follow, and suggests remedies.

Flax and MaxText resolve rules that cannot all be followed silently. Most of these cases are intended: a mesh axis has one
device, or a later rule for the same name covers the case in which the earlier one does not fit. A conflict is a case that
no rule covers.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
import dataclasses
import enum
import functools
import math
from typing import Any, Literal
import warnings

from maxtext_pp_ext.errors import Refusal
from maxtext_pp_ext.nearest import nearest
from maxtext_pp_ext.sharding.resolve import Dimension, Dropped, mesh_axes, Resolution, Rule, spec_entry
from maxtext_pp_ext.units import counted

OnConflict = Literal["fallback", "warn", "error"]
ON_CONFLICT = ("fallback", "warn", "error")
_MOST_ARRAYS = 20  # in the text of one conflict; `conflicts` of an error has all of them


class Kind(enum.Enum):
  """The kinds of conflicts."""

  TAKEN = "two dimensions want the same mesh axis"
  MISSING = "a rule for a mesh axis that the mesh lacks"
  INDIVISIBLE = "a dimension that its mesh axes do not divide"
  SHADOWED = "a rule that can never apply"
  UNKNOWN = "a logical name without a rule"
  RANK = "more logical axes than dimensions"
  UNNAMED = "fewer logical axes than dimensions"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conflict:
  """One conflict of one array."""

  kind: Kind
  path: str  #: the array's path; "" if it has none
  names: Sequence  #: the array's logical axes
  shape: tuple[int, ...] | None  #: the array's shape; None if unknown
  rules: tuple[Rule, ...]  #: the rules involved, in order
  problem: str  #: the conflict and its effect
  remedy: str  #: what would resolve the conflict

  @property
  def array(self) -> str:
    """The array: its path, shape and logical axes."""
    shape = "" if self.shape is None else f" {list(self.shape)}"
    return f"{self.path or 'an array'}{shape} ({', '.join(map(_entry_text, self.names))})"


class ShardingConflictError(Refusal, ValueError):
  """Conflicts of `on_conflict="error"`; the message lists each conflict with its arrays, `conflicts` has all of them."""

  def __init__(self, conflicts: Sequence[Conflict]):
    self.conflicts = tuple(conflicts)
    super().__init__(conflicts_text(self.conflicts))

  def __reduce__(self):
    return type(self), (self.conflicts,)


class ShardingConflictWarning(UserWarning):
  """Conflicts of `on_conflict="warn"`."""


def settle(conflicts: Iterable[Conflict], on_conflict: OnConflict) -> None:
  """Raises ShardingConflictError, warns or does nothing about conflicts, as `on_conflict` says."""
  if on_conflict not in ON_CONFLICT:
    raise ValueError(f"on_conflict={on_conflict!r} must be one of {', '.join(map(repr, ON_CONFLICT))}.")
  conflicts = () if on_conflict == "fallback" else tuple(conflicts)
  if conflicts and on_conflict == "error":
    raise ShardingConflictError(conflicts)
  if conflicts:
    warnings.warn(conflicts_text(conflicts), ShardingConflictWarning, stacklevel=3)


def conflicts(resolution: Resolution, path: str = "") -> list[Conflict]:
  """All conflicts of one array's resolution."""
  of_array = functools.partial(Conflict, path=path, names=resolution.names, shape=resolution.shape)
  dimensions = resolution.dimensions[: None if resolution.shape is None else len(resolution.shape)]
  finders = (_without_rule, _taken, _missing, _indivisible, _shadowed)
  found = [*_rank(resolution), *(each for d in dimensions for find in finders for each in find(resolution, d))]
  return [of_array(kind=kind, rules=rules, problem=problem, remedy=remedy) for kind, rules, problem, remedy in found]


_Found = tuple[Kind, tuple[Rule, ...], str, str]


def _rank(resolution: Resolution) -> Iterator[_Found]:
  names, shape = resolution.names, resolution.shape
  if shape is not None and len(names) > len(shape):
    problem = f"{len(names)} logical axes for {len(shape)} dimensions; the last {len(names) - len(shape)} are ignored"
    yield Kind.RANK, (), problem, "Annotate each dimension once."
  named = len(names) - resolution.added
  if shape is not None and 0 < named < len(shape):
    yield (
        Kind.UNNAMED,
        (),
        f"{named} logical axes for {len(shape)} dimensions, so it cannot be told which of them are meant; the names are"
        " taken for the first dimensions, and the others are replicated",
        "Name each dimension, with None for one to replicate. nnx.vmap and nnx.scan name the dimension that they add"
        " only with transform_metadata={nnx.PARTITION_NAME: …}.",
    )


def _without_rule(resolution: Resolution, dimension: Dimension) -> Iterator[_Found]:
  name = dimension.name
  if not isinstance(name, str) or dimension.rule or dimension.passed:
    return
  alike = nearest(name, {rule.name for rule in resolution.rules}, 1)
  meant = f"Did you mean {alike[0]!r}? Otherwise" if alike else "Either"
  remedy = f"{meant} add the rule ({name!r}, None) to replicate it, or one for the mesh axis to shard it over."
  yield Kind.UNKNOWN, (), f"there is no rule for {name!r}, so it is replicated", remedy


def _taken(resolution: Resolution, dimension: Dimension) -> Iterator[_Found]:
  """Reports only a dimension that no rule binds: a later rule that binds the dimension would cover the case."""
  if dimension.rule or not isinstance(dimension.name, str):
    return
  sizes = resolution.mesh_shape
  passed = [passed for passed in dimension.passed if any(sizes.get(a, 1) > 1 for a in passed.rule.axes)]
  if not passed:
    return
  taken = {axis: i for p in passed for axis, i in p.taken.items()}
  taken = {axis: i for axis, i in taken.items() if sizes.get(axis, 1) > 1} or taken
  held = [resolution.dimensions[i] for i in sorted(set(taken.values()))]
  lost = spec_entry(tuple(dict.fromkeys(a for p in passed for a in p.rule.axes if sizes.get(a, 1) > 1)))
  problem = " and ".join(
      f"{_entry_text(d.name)!r} has {_axes_text([a for a, i in taken.items() if i == d.index], sizes)}"
      + (f" by {d.rule}" if d.rule else "")
      for d in held
  )
  rules = tuple(p.rule for p in passed)
  yield (
      Kind.TAKEN,
      (*(d.rule for d in held if d.rule), *rules),
      f"{problem}, so {_and(rules)} was passed over, and {dimension.name!r} is not sharded over {lost!r}",
      f"Add {_suggested(resolution, dimension)}, after the rule that does not apply, or remove the common axis from one "
      "of the rules.",
  )


def _missing(resolution: Resolution, dimension: Dimension) -> Iterator[_Found]:
  if missing := _and(axis for axis, why in dimension.dropped.items() if why is Dropped.MISSING):
    where = dimension.rule or f"the annotation {_entry_text(dimension.name)}"
    problem = f"{where} names {missing}, which the mesh ({', '.join(resolution.mesh_shape)}) does not have"
    yield Kind.MISSING, _bound_by(dimension), problem, f"Add {missing} to the mesh, or remove it from the rule."


def _indivisible(resolution: Resolution, dimension: Dimension) -> Iterator[_Found]:
  dropped = [axis for axis, why in dimension.dropped.items() if why is Dropped.INDIVISIBLE]
  if not dropped or dimension.size is None:
    return
  sizes = resolution.mesh_shape
  wanted = [a for a in (dimension.rule.axes if dimension.rule else dimension.name) if sizes.get(a, 1) > 1]
  product = math.prod(sizes[a] for a in wanted)
  yield (
      Kind.INDIVISIBLE,
      _bound_by(dimension),
      f"{dimension.rule or 'its annotation'} shards {_entry_text(dimension.name)!r} over {_axes_text(wanted, sizes)}, and"
      f" its size {dimension.size} is not a multiple of {product}, so it is not sharded over {_and(dropped)}",
      f"Make it {-(-dimension.size // product) * product}, or bind {_entry_text(dimension.name)!r} to mesh axes that"
      f" divide {dimension.size}.",
  )


def _shadowed(resolution: Resolution, dimension: Dimension) -> Iterator[_Found]:
  """Reports a rule whose mesh axes include all those of an earlier rule: if they are free, the earlier rule applies."""
  rules = [*(passed.rule for passed in dimension.passed), *_bound_by(dimension)]
  rules.sort(key=lambda rule: (not rule.own, rule.index))
  for i, rule in enumerate(rules):
    # A variable's own rules are meant to override those of the context.
    if earlier := next((r for r in rules[:i] if r.own == rule.own and set(r.axes) <= set(rule.axes)), None):
      problem = f"{rule} can never apply: whenever its mesh axes are free, {earlier} has bound {rule.name!r}"
      yield Kind.SHADOWED, (earlier, rule), problem, f"Put it before {earlier}, or remove it."


def _bound_by(dimension: Dimension) -> tuple[Rule, ...]:
  return (dimension.rule,) if dimension.rule else ()


def _suggested(resolution: Resolution, dimension: Dimension) -> str:
  used = {axis for d in resolution.dimensions if d.rule for axis in d.rule.axes}
  used |= {axis for d in resolution.dimensions if not isinstance(d.name, str) for axis in mesh_axes(d.name)}
  free = [axis for axis, size in resolution.mesh_shape.items() if size > 1 and axis not in used]
  free = [axis for axis in free if dimension.size is None or dimension.size % resolution.mesh_shape[axis] == 0]
  replicated = f"the rule ({dimension.name!r}, None) to replicate it"
  return f"{replicated}, or ({dimension.name!r}, {free[0]!r}) to shard it" if free else replicated


def _axes_text(axes: Iterable[str], sizes: Mapping[str, int]) -> str:
  return _and(f"{axis} ({sizes[axis]} devices)" if sizes.get(axis, 1) > 1 else f"{axis} (1 device)" for axis in axes)


def _entry_text(name: Any) -> str:
  return str(spec_entry(name) if isinstance(name, tuple) else name)


def _and(items: Iterable[Any]) -> str:
  return " and ".join(map(str, items))


def by_problem(found: Iterable[Conflict]) -> dict[tuple[Kind, str, str], list[str]]:
  """Each distinct conflict, as (kind, problem, remedy), with the arrays that have it."""
  groups: dict[tuple[Kind, str, str], list[str]] = {}
  for conflict in found:
    groups.setdefault((conflict.kind, conflict.problem, conflict.remedy), []).append(conflict.array)
  return groups


def conflicts_text(found: Sequence[Conflict]) -> str:
  """Each distinct conflict, with the arrays that have it, or the first `_MOST_ARRAYS` and the number of others."""
  groups = by_problem(found)
  lines = [f"{counted(len(groups), 'sharding conflict')}:"]
  for (kind, problem, remedy), arrays in groups.items():
    lines += [f"  - {kind.value}: {problem}. {remedy}", *(f"      {array}" for array in arrays[:_MOST_ARRAYS])]
    if len(arrays) > _MOST_ARRAYS:
      lines.append(f"      and {len(arrays) - _MOST_ARRAYS} more")
  return "\n".join(lines)

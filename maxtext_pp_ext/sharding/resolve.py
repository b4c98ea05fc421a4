# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Resolves logical axes to a PartitionSpec by rules and a mesh, and records what each rule did; what a pipeline gathers.

The algorithm is that of `flax.linen.logical_to_mesh_axes`. Rules are tried in order. The first rule that fits binds a
dimension, and a mesh axis is bound to at most one dimension of an array.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
import dataclasses
import enum
import functools
import itertools
import math
from typing import Any

from flax.core.spmd import get_logical_axis_rules
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

# For each dimension a logical name, mesh axes (a tuple, as in a PartitionSpec), None, or PartitionSpec.UNCONSTRAINED.
LogicalAxes = tuple[str | tuple[str, ...] | None, ...]
# Logical axes along which each device computes with its own shard of a weight, such as its own experts. A mesh axis bound
# to one of these is never gathered, although it may shard the batch elsewhere.
OWNED_LOGICAL_AXES = frozenset({"exp", "exp_with_fsdp"})


def mesh_axes(entry: Any) -> tuple[str, ...]:
  """The mesh axes of one entry of a PartitionSpec."""
  if entry is None or entry is P.UNCONSTRAINED:
    return ()
  return (entry,) if isinstance(entry, str) else tuple(entry)


def spec_entry(axes: Sequence[str]) -> str | tuple[str, ...] | None:
  """The entry of a PartitionSpec for these mesh axes."""
  return None if not axes else axes[0] if len(axes) == 1 else tuple(axes)


def divisible(axes: Iterable[str], size: int, mesh_shape: Mapping[str, int]) -> tuple[str, ...]:
  """The mesh axes, in order, that divide a dimension of this size together with the axes kept before them."""
  kept: tuple[str, ...] = ()
  for axis in axes:
    if size % math.prod(mesh_shape[a] for a in (*kept, axis)) == 0:
      kept = (*kept, axis)
  return kept


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
  """A pair of a logical name and the mesh axes that it is bound to."""

  index: int  #: the rule's place in its list of rules
  name: str  #: the logical name
  binds: Any  #: mesh axes, () for replication, or PartitionSpec.UNCONSTRAINED
  own: bool = False  #: whether it is one of a variable's own rules, which come before all others

  @property
  def axes(self) -> tuple[str, ...]:
    return mesh_axes(self.binds)

  def __str__(self) -> str:
    binds = "UNCONSTRAINED" if self.binds is P.UNCONSTRAINED else repr(spec_entry(self.binds))
    return f"{'own ' if self.own else ''}rule ({self.name!r}, {binds})"


class Rules(tuple[Rule, ...]):
  """Rules that have been read, so that they are read once for all variables of a tree."""

  def __hash__(self) -> int:
    return hash(self[:1])  # those of two configs differ seldom, and comparison sees it at once


def read_rules(rules: Iterable | None, own: Iterable = ()) -> Rules:
  """Reads (logical name, mesh axis or axes or None or UNCONSTRAINED) pairs; a variable's own pairs come first.

  `rules=None` stands for those of the context, `flax.linen.logical_axis_rules`. Raises ValueError if a rule is no such
  pair, or names a mesh axis twice.
  """
  if rules is None:
    rules = get_logical_axis_rules() or ()
  if not isinstance(rules, Rules):
    rules = list(rules)
    try:
      rules = _rules(tuple((name, tuple(binds) if isinstance(binds, list) else binds) for name, binds in rules))
    except (TypeError, ValueError):  # not all of them are pairs that can be hashed
      rules = Rules(_read_rule(index, pair, own=False) for index, pair in enumerate(rules))
  if not own:
    return rules
  return Rules((*(_read_rule(index, pair, own=True) for index, pair in enumerate(own)), *rules))


@functools.lru_cache(maxsize=64)
def _rules(pairs: tuple) -> Rules:
  return Rules(_read_rule(index, pair, own=False) for index, pair in enumerate(pairs))


def _read_rule(index: int, pair: Any, *, own: bool) -> Rule:
  try:
    name, binds = pair
    if binds is not P.UNCONSTRAINED:
      binds = mesh_axes(binds)
      if not all(isinstance(axis, str) for axis in binds):
        raise TypeError
  except (TypeError, ValueError):
    raise ValueError(
        f"Rule {index}, {pair!r}, is not a pair of a logical name and a mesh axis, several of them, None or"
        " UNCONSTRAINED."
    ) from None
  if binds is not P.UNCONSTRAINED and len(set(binds)) < len(binds):
    raise ValueError(f"Rule {index}, {pair!r}, names a mesh axis twice.")
  return Rule(index=index, name=name, binds=binds, own=own)


class Dropped(enum.Enum):
  """The reason why a mesh axis of the rule that bound a dimension is not in the PartitionSpec."""

  ONE_DEVICE = "one device"
  MISSING = "not in the mesh"
  INDIVISIBLE = "does not divide the dimension"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PassedOver:
  """A rule for a dimension that did not bind it."""

  rule: Rule
  #: {mesh axis of the rule: dimension that it was already bound to}; empty if this dimension was already bound.
  taken: Mapping[str, int]

  @property
  def why(self) -> str:
    if not self.taken:
      return "an earlier rule has bound the dimension"
    return ", ".join(f"{axis} is bound to dimension {i}" for axis, i in self.taken.items())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dimension:
  """One dimension of an array."""

  index: int  #: number of the dimension
  size: int | None  #: its size; None if the array's shape was not given
  name: Any  #: its annotation; only a str is a logical name
  rule: Rule | None  #: the rule that bound it; None if no rule did
  passed: tuple[PassedOver, ...]  #: the other rules for its name, in order
  #: Mesh axes that it was bound to but that are not in the PartitionSpec, with the reasons.
  dropped: Mapping[str, Dropped]
  entry: Any  #: its entry of the PartitionSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resolution:
  """The result of binding an array's logical axes to mesh axes."""

  names: LogicalAxes  #: the array's annotation, one name per dimension
  shape: tuple[int, ...] | None  #: the array's shape, if given. By mistake an annotation may be shorter or longer.
  mesh_shape: Mapping[str, int]  #: the size of each mesh axis
  rules: Rules
  dimensions: tuple[Dimension, ...]  #: one per name
  added: int = 0  #: number of the names, all None, that its annotation lacked

  @property
  def spec(self) -> P:
    return P(*(dimension.entry for dimension in self.dimensions[: None if self.shape is None else len(self.shape)]))


def resolution(
    names: Sequence | None, mesh: Mesh | AbstractMesh, rules: Iterable | None = None, shape: Sequence[int] | None = None
) -> Resolution:
  """Binds an array's logical axes to mesh axes. Raises ValueError if a name occurs twice, or a rule is malformed.

  Args:
    names: for each dimension a logical name, None, UNCONSTRAINED, or a tuple of mesh axes; None without annotation.
    mesh: the device mesh.
    rules: (logical name, mesh axes) pairs; None for those of the context.
    shape: the array's shape. If it is given, mesh axes that do not divide their dimension are dropped, one by one.
  """
  names, rules = tuple(names or ()), read_rules(rules)
  logical = [name for name in names if isinstance(name, str)]
  if len(set(logical)) < len(logical):
    twice = sorted({name for name in logical if logical.count(name) > 1})
    raise ValueError(f"The logical axes {names} have {', '.join(map(repr, twice))} more than once.")
  bound: dict[int, Rule] = {}
  passed: dict[int, list[PassedOver]] = {}
  holder = {axis: i for i, name in enumerate(names) if not isinstance(name, str) for axis in mesh_axes(name)}
  for rule in rules:
    if rule.name not in logical:
      continue
    i = names.index(rule.name)
    taken = {} if i in bound else {axis: holder[axis] for axis in rule.axes if axis in holder}
    if i in bound or taken:
      passed.setdefault(i, []).append(PassedOver(rule=rule, taken=taken))
    else:
      bound[i] = rule
      holder |= dict.fromkeys(rule.axes, i)
  mesh_shape = dict(mesh.shape)
  dimensions = []
  for i, (name, size) in enumerate(zip(names, itertools.chain(shape or (), itertools.repeat(None)), strict=False)):
    by = bound.get(i)
    binds = (by.binds if by else ()) if isinstance(name, str) else name
    entry, dropped = _entry(binds, size, mesh_shape)
    dimensions.append(
        Dimension(index=i, size=size, name=name, rule=by, passed=tuple(passed.get(i, ())), dropped=dropped, entry=entry)
    )
  return Resolution(
      names=names,
      shape=None if shape is None else tuple(shape),
      mesh_shape=mesh_shape,
      rules=rules,
      dimensions=tuple(dimensions),
  )


def _entry(binds: Any, size: int | None, mesh_shape: Mapping[str, int]) -> tuple[Any, dict[str, Dropped]]:
  if binds is P.UNCONSTRAINED:
    return binds, {}
  axes = mesh_axes(binds)
  dropped = {a: Dropped.MISSING if a not in mesh_shape else Dropped.ONE_DEVICE for a in axes if mesh_shape.get(a, 1) == 1}
  axes = tuple(a for a in axes if a not in dropped)
  kept = axes if size is None else divisible(axes, size, mesh_shape)
  return spec_entry(kept), dropped | {a: Dropped.INDIVISIBLE for a in axes if a not in kept}


def resolve(
    names: Sequence | None, mesh: Mesh | AbstractMesh, rules: Iterable | None = None, shape: Sequence[int] | None = None
) -> P:
  """The PartitionSpec of `resolution`: one entry per dimension, P() without annotation."""
  return resolution(names, mesh, rules, shape).spec


def gathered_spec(spec: P, axes: Sequence | None, data_axes: Collection[str]) -> P:
  """The layout of a weight when a stage computes with it: `spec` without the mesh axes that have to be gathered.

  A mesh axis that shards the activations' batch or sequence cannot stay on a weight's dimension while the stage
  multiplies the two, so it is gathered. It stays if the logical axis is one of `OWNED_LOGICAL_AXES`. The decision
  depends on the weight's logical axes only: not on its name, and not on the order of the parameter tree.

  `axes` are the weight's logical axes, or None; `data_axes` the mesh axes over which the activations' batch and sequence
  are sharded. Raises ValueError if there are more or fewer logical axes than entries of `spec`.
  """
  names = tuple(axes) if axes is not None else (None,) * len(spec)
  if len(names) != len(spec):
    raise ValueError(
        f"{len(names)} logical axes {names} for the {len(spec)} entries of {spec}: it cannot be told which of them are "
        "meant. Name each dimension, with None for one without a name."
    )

  def kept(entry: Any, name: Any) -> Any:
    if name in OWNED_LOGICAL_AXES or entry is P.UNCONSTRAINED:
      return entry
    return spec_entry(tuple(axis for axis in mesh_axes(entry) if axis not in data_axes))

  return P(*(kept(entry, name) for entry, name in zip(spec, names, strict=True)))


def gathered_last(spec: P, gathered: P) -> P:
  """`spec` with the mesh axes that `gathered` lacks moved to the end of their entry.

  Only in this order does a gather over them give each device one block of the dimension. If the order changes, shards
  are exchanged once; each device then transfers as many bytes as it holds.
  """

  def ordered(entry: Any, kept: Any) -> Any:
    axes, stay = mesh_axes(entry), mesh_axes(kept)
    return spec_entry((*(axis for axis in axes if axis in stay), *(axis for axis in axes if axis not in stay)))

  return P(*(ordered(entry, kept) for entry, kept in zip(spec, gathered, strict=True)))

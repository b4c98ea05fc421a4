# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Maps trees of NNX variables to trees of shardings."""

from collections.abc import Iterable
import dataclasses
import functools
import math
import operator
from typing import Any

from flax import nnx
import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np

from maxtext_pp_ext.sharding.conflicts import Conflict, conflicts, OnConflict, settle
from maxtext_pp_ext.sharding.resolve import LogicalAxes, mesh_axes, read_rules, Resolution, resolution, Rules

PyTree = Any

# Versions of Flax keep annotations under these names; the first one that is set wins.
_ANNOTATIONS = ("out_sharding", "sharding_names", "sharding")
# The key under which MaxText's scans over layers record the dimension along which they stacked a variable.
_SCAN_AXIS = "param_scan_axis"
# MaxText's names of dimensions along which a variable may be stacked, besides that of its last scan, which its metadata
# have. The last one is that of a scan within a layer, the innermost.
_STACKS = ("circular_repeats", "layers", "layers_per_stage", "local_layers")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
  """The layout of one array."""

  path: str  #: the array's path in its tree
  shape: tuple[int, ...]
  dtype: Any
  sharding: NamedSharding
  #: How the sharding was resolved; None if the array has a PartitionSpec, a sharding or no annotation.
  resolution: Resolution | None
  #: Whether it takes another array's annotation, as far as that fits. True for optimizer state, and for smaller parts of
  #: a composite value, such as the scales of quantized weights.
  follows: bool = False

  @property
  def conflicts(self) -> list[Conflict]:
    """The conflicts of its resolution; none if it follows another array."""
    return [] if self.resolution is None or self.follows else conflicts(self.resolution, self.path)


def annotation(variable: nnx.Variable) -> Any:
  """The sharding annotation in a variable's metadata: names, a PartitionSpec, a sharding, or None."""
  metadata = variable.get_metadata()
  return next((metadata[key] for key in _ANNOTATIONS if metadata.get(key)), None)


def logical_axes(variable: nnx.Variable) -> LogicalAxes | None:
  """The axis names in a variable's metadata, with the name of a scan over layers; None if it has none."""
  if (names := annotation(variable)) is None:
    return None
  names = getattr(names, "spec", names)
  return tuple(names) if isinstance(names, P) else _with_scan_axis(names, variable)[0]


def _with_scan_axis(names: Any, variable: nnx.Variable) -> tuple[LogicalAxes, int]:
  """(names with that of the dimension along which layers are stacked, how many None were added in front of that name)."""
  names = (names,) if isinstance(names, str) else tuple(names)
  metadata = variable.get_metadata()
  if _SCAN_AXIS not in metadata or nnx.PARTITION_NAME not in metadata:
    return names, 0
  stacked, place = metadata[nnx.PARTITION_NAME], metadata[_SCAN_AXIS]
  rank = getattr(variable.get_value(), "ndim", len(names))
  if stacked not in names:
    added = max(0, place - len(names))
    return (*names[:place], *(None,) * added, stacked, *names[place:]), added
  if len(names) < rank and set(names) <= {stacked, *_STACKS}:
    names = _of_stacks(names, stacked, place, rank)
  return names, 0


def _of_stacks(names: LogicalAxes, stacked: str, place: int, rank: int) -> LogicalAxes:
  """Puts the names of stacks where they belong in a variable whose own dimensions have no names.

  MaxText 0.2.5 names each stack as if the own dimensions were not there: the first scan comes first, others at `place`,
  and a pipeline's axes, which are in front of all, at the front.
  """
  own: LogicalAxes = (None,) * (rank - len(names))
  if place == 0:
    return (*names, *own)
  first = names.index(_STACKS[-1] if _STACKS[-1] in names else stacked)
  within = list(own)
  for name in (names[first], *reversed(names[first + 1 :])):
    within.insert(min(place, len(within)), name)
  return (*names[:first], *within)


def layouts(tree: PyTree, mesh: Mesh | AbstractMesh, rules: Iterable | None = None) -> list[Layout]:
  """The layouts of all arrays of a tree of NNX variables, an NNX module included; see `named_shardings`."""
  rules = read_rules(rules)
  if isinstance(tree, nnx.Module):
    tree = nnx.state(tree)
  leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_variable)
  return jax.tree.leaves([_layouts(keys, leaf, mesh, rules) for keys, leaf in leaves])


def named_shardings(
    tree: PyTree, mesh: Mesh | AbstractMesh, rules: Iterable | None = None, *, on_conflict: OnConflict = "fallback"
) -> PyTree:
  """Resolves the logical axes of a tree of NNX variables.

  Args:
    tree: variables with arrays or ShapeDtypeStructs, as in `nnx.state(nnx.eval_shape(init_fn))`. Values may be trees of
      arrays (quantized weights), or have no array (optax's MaskedNode). An array that is no variable is replicated.
    mesh: the device mesh; an AbstractMesh suffices if nothing is placed.
    rules: (logical name, mesh axes) pairs; None for those of the context. A variable's own `sharding_rules` come first.
      If there are no rules at all, names are taken as mesh axes.
    on_conflict: "fallback", "warn" or "error": what is done about rules that cannot all be followed.

  Returns the tree with a NamedSharding in the place of each array, in the same nnx.Variables. A variable's own sharding
  or PartitionSpec is used unchanged. `unwrap` removes the variables. With on_conflict="error" raises
  ShardingConflictError for all conflicts of the tree.
  """
  rules = read_rules(rules)
  settle((c for layout in layouts(tree, mesh, rules) for c in layout.conflicts), on_conflict)

  def shardings(path: Any, leaf: Any) -> Any:
    found = jax.tree.map(operator.attrgetter("sharding"), _layouts(path, leaf, mesh, rules))
    if not is_variable(leaf):
      return found
    return leaf.replace(found) if jax.tree.leaves(found) else leaf

  return jax.tree_util.tree_map_with_path(shardings, tree, is_leaf=is_variable)


def unwrap(tree: PyTree) -> PyTree:
  """The tree with each nnx.Variable replaced by its value: shardings as `jax.jit` takes them."""
  return jax.tree.map(value_of, tree, is_leaf=is_variable)


def is_variable(x: Any) -> bool:
  return isinstance(x, nnx.Variable)


def value_of(x: Any) -> Any:
  return x.get_value() if is_variable(x) else x


path_text = functools.partial(jax.tree_util.keystr, simple=True, separator="/")


def key_names(keys: Iterable[Any]) -> tuple[str, ...]:
  """The keys of a tree's path as text."""
  return tuple(jax.tree_util.keystr((key,), simple=True) for key in keys)


def _layouts(path: tuple, leaf: Any, mesh: Mesh | AbstractMesh, rules: Rules) -> PyTree:
  """The layouts of one variable's arrays, in the tree of its value."""
  value = value_of(leaf)
  largest = max((math.prod(np.shape(array)) for array in jax.tree.leaves(value)), default=0)

  def layout(below: Any, array: Any) -> Layout:
    sharding, how = _sharding(leaf, array, mesh, rules)
    return Layout(
        path=path_text((*path, *below)),
        shape=np.shape(array),
        dtype=getattr(array, "dtype", type(array)),
        sharding=sharding,
        resolution=how,
        follows=math.prod(np.shape(array)) < largest or isinstance(leaf, nnx.OptState),
    )

  return jax.tree_util.tree_map_with_path(layout, value)


def _sharding(leaf: Any, array: Any, mesh: Mesh | AbstractMesh, rules: Rules) -> tuple[NamedSharding, Resolution | None]:
  given = annotation(leaf) if is_variable(leaf) else None
  if given is None:
    return NamedSharding(mesh, P()), None
  if isinstance(given, jax.sharding.Sharding):
    return given, None  # type: ignore[return-value]  # others than named ones can be placed, too
  if isinstance(given, P):
    return NamedSharding(mesh, given), None
  names, added = _with_scan_axis(given, leaf)
  if not (rules := read_rules(rules, own=leaf.get_metadata().get("sharding_rules") or ())):
    names = tuple(mesh_axes(name) if isinstance(name, str) else name for name in names)
  how = dataclasses.replace(resolution(names, mesh, rules, np.shape(array)), added=added)
  return NamedSharding(mesh, how.spec), how

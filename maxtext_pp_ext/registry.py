# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Pipeline implementations by name: the values of the config key `pipeline_impl`.

The built-in ones are listed at the end. An installed package adds its own with entry points of the group
`maxtext_pp_ext.pipelines`; docs/extending.md has the contract of their classes. Names are collected once, on first use.
An implementation is imported when it is loaded, not before. No JAX.
"""

from collections.abc import Callable, Mapping
import dataclasses
import functools
import importlib.metadata
import inspect
import re
import types
from typing import Any

from maxtext_pp_ext.errors import Refusal, SetupError
from maxtext_pp_ext.nearest import did_you_mean
from maxtext_pp_ext.schedule import CircularSchedule, GatherPolicy, Schedule

ENTRY_POINT_GROUP = "maxtext_pp_ext.pipelines"
HOST = "host"

# The constructor parameters and methods that a class must have to replace the host's pipeline module.
_CONSTRUCTOR_PARAMETERS = ("config", "stage_factory", "mesh", "remat_policy", "rngs")
_METHODS = ("__call__", "get_weight_sharding")

# No name of an implementation: YAML reads "null" to "nan" as other values, and commands that compare implementations use
# "none" for a model without a pipeline, and "host-…" for modes of MaxText's own pipelines.
_NO_NAME = re.compile(r"(none|null|true|false|yes|no|on|off|y|n|inf|nan|host-.*)", re.IGNORECASE)
_NAME = re.compile(r"[A-Za-z_][\w.-]*", re.ASCII)

_RENAME = "Rename that entry point or uninstall its package."


class UnknownImplementationError(Refusal, ValueError):
  """No implementation has this name; the message lists the known names and the nearest match."""


class PluginError(SetupError):
  """An installed package's entry point cannot be used; the message names the package, the entry point and the reason."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contract:
  """An implementation's class, and what the class may have beside the methods that every pipeline has."""

  module_class: type  #: the NNX module class
  gather_policy: GatherPolicy | None = None  #: when weights are gathered, and how long they are kept; None if not said
  schedule_class: type[Schedule] = CircularSchedule
  shards_automatically: bool = False  #: whether layers are built for automatic sharding, also with explicit sharding
  #: Runs layers without a pipeline, as that of `CircularPipelineBase`; None for a class that runs pipelines only.
  run_scanned: Callable[..., Any] | None = None


# What each optional attribute of a class has to be, as a test and in words. None stands for an absent one.
_OPTIONAL: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "gather_policy": (lambda value: isinstance(value, GatherPolicy), "a maxtext_pp_ext.schedule.GatherPolicy"),
    "schedule_class": (lambda value: callable(getattr(value, "of_config", None)), "a class with of_config(config)"),
    "shards_automatically": (lambda value: isinstance(value, bool), "True or False"),
    "run_scanned": (callable, "a classmethod"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Implementation:
  """A named implementation."""

  name: str  #: the value of `pipeline_impl`
  summary: str  #: one line that helps to choose
  #: Imports and returns the NNX module class. For `host` it raises ValueError: MaxText chooses among its own pipelines.
  load: Callable[[], type]

  @functools.cached_property
  def contract(self) -> Contract:
    """What the loaded class has. Raises what `load` raises."""
    module_class = self.load()
    given = {name: found for name in _OPTIONAL if (found := getattr(module_class, name, None)) is not None}
    return Contract(module_class=module_class, **given)


def names() -> tuple[str, ...]:
  """All names, the built-in ones first.

  Raises:
    PluginError: an installed package claims a name that is taken.
  """
  return tuple(_implementations())


def get(name: str) -> Implementation:
  """The implementation of that name.

  Raises:
    UnknownImplementationError: no implementation has this name.
    PluginError: an installed package claims a name that is taken.
  """
  try:
    return _implementations()[name]
  except (KeyError, TypeError):  # TypeError: not even hashable
    listed = f"Known are {', '.join(map(repr, names()))}"
    message = f"pipeline_impl={name!r} is not known. {listed}{did_you_mean(name, names())}"
    if str(name).lower() == "none":  # MaxText reads none as None
      message = f"pipeline_impl=none names no implementation. {listed}; for no pipeline set ici_pipeline_parallelism=1."
    raise UnknownImplementationError(message) from None


def reset() -> None:
  """Forgets the collected names, so that the next call sees packages that were installed since. For tests."""
  _implementations.cache_clear()


@functools.cache
def _implementations() -> Mapping[str, Implementation]:
  found = {implementation.name: implementation for implementation in _BUILT_IN}
  origins = dict.fromkeys(found, "maxtext_pp_ext itself")
  unique: dict[tuple[str, str], importlib.metadata.EntryPoint] = {}
  for entry_point in _entry_points():  # may find one package twice, such as an editable install and a build folder
    unique.setdefault((entry_point.name, entry_point.value), entry_point)
  for entry_point in unique.values():
    described = _describe(entry_point)
    if not _NAME.fullmatch(entry_point.name) or _NO_NAME.fullmatch(entry_point.name):
      raise PluginError(f"{described} has a name that pipeline_impl cannot have. {_RENAME}")
    if entry_point.name in found:
      taken = f"claims the name {entry_point.name!r}, which belongs to {origins[entry_point.name]}"
      raise PluginError(f"{described} {taken}. {_RENAME}")
    origins[entry_point.name] = described
    found[entry_point.name] = Implementation(
        name=entry_point.name,
        summary=f"from {_distribution(entry_point)}",
        load=functools.cache(functools.partial(_load_plugin, entry_point)),
    )
  return types.MappingProxyType(found)


def _entry_points() -> list[importlib.metadata.EntryPoint]:
  try:
    return list(importlib.metadata.entry_points(group=ENTRY_POINT_GROUP))
  except Exception as error:  # Python reads the entry points of all packages, whatever the group
    raise PluginError(
        f"The entry points of the installed packages cannot be read ({type(error).__name__}: {error}): the "
        "entry_points.txt of one of them is damaged. Reinstall that package."
    ) from error


def _load_plugin(entry_point: importlib.metadata.EntryPoint) -> type:
  try:
    loaded = entry_point.load()
    problem = contract_problem(loaded)
  except (Exception, SystemExit) as error:  # a module may end the process, too
    raise PluginError(
        f"{_describe(entry_point)} cannot be imported: {type(error).__name__}: {error}. Repair or uninstall its "
        "package, or choose another pipeline_impl."
    ) from error
  if problem is not None:
    raise PluginError(f"{_describe(entry_point)} cannot be used as a pipeline: {problem}.")
  return loaded


def contract_problem(loaded: object) -> str | None:
  """The reason why an object is no pipeline module class, or None."""
  if not isinstance(loaded, type):
    kind = "None" if loaded is None else f"an object of type {type(loaded).__name__}"
    return f"it is {kind}, expected a class derived from flax.nnx.Module"
  from flax import nnx  # pylint: disable=import-outside-toplevel

  if not issubclass(loaded, nnx.Module):
    return f"class {loaded.__name__} is not derived from flax.nnx.Module"
  # Not getattr: that finds `__call__` on every class, since classes can be called.
  in_class = lambda name: next((vars(each)[name] for each in loaded.__mro__ if name in vars(each)), None)
  if missing := [method for method in _METHODS if not callable(in_class(method))]:
    return f"class {loaded.__name__} has no method {' and no method '.join(missing)}"
  parameters = inspect.signature(loaded.__init__).parameters
  absent = [name for name in _CONSTRUCTOR_PARAMETERS if name not in parameters]
  if absent and not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
    return (
        f"{loaded.__name__}.__init__{inspect.signature(loaded.__init__)} takes no {', '.join(absent)}; expected "
        "__init__(self, config, stage_factory, mesh, remat_policy=None, *, rngs)"
    )
  for name, (is_sound, expected) in _OPTIONAL.items():
    if (value := getattr(loaded, name, None)) is not None and not is_sound(value):
      return f"{loaded.__name__}.{name} is {value!r}, expected {expected}"
  return None


def _distribution(entry_point: importlib.metadata.EntryPoint) -> str:
  dist = entry_point.dist
  return "an unnamed distribution" if dist is None else f"{dist.name} {dist.version}"


def _describe(entry_point: importlib.metadata.EntryPoint) -> str:
  return (
      f"The entry point '{entry_point.name} = {entry_point.value}' ({ENTRY_POINT_GROUP}) of {_distribution(entry_point)}"
  )


def _built_in(name: str, summary: str, class_name: str) -> Implementation:
  entry_point = importlib.metadata.EntryPoint(name, f"maxtext_pp_ext.pipelines.circular:{class_name}", ENTRY_POINT_GROUP)
  return Implementation(name=name, summary=summary, load=entry_point.load)


def _load_host() -> type:
  raise ValueError("pipeline_impl='host' names no class: MaxText chooses among its own pipelines.")


_OF_BSW = "gathers each weight once per repeat and direction (Buffer Sliding Window); two repeats' weights held"
_BUILT_IN = (
    Implementation(name=HOST, summary="MaxText's own pipelines, untouched (the default)", load=_load_host),
    _built_in("circular", "gathers weights at every iteration; least memory", "CircularPipeline"),
    _built_in("circular_bsw", _OF_BSW, "CircularBswPipeline"),
    _built_in("circular_ag_once", "gathers all weights once per step; most memory", "CircularAllGatherOncePipeline"),
)

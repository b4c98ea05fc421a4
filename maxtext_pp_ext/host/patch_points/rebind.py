# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Replaces objects of MaxText where they are bound, and puts them back."""

from collections.abc import Callable
import dataclasses
import functools
import inspect
import sys
from types import FunctionType, ModuleType
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Swap:
  """An object that replaces another one wherever MaxText has bound it: many modules import it by name."""

  home: Any  # the module or class that defines it
  name: str
  old: Any
  new: Any


class Rebinding:
  """Replacements that can be undone together."""

  def __init__(self) -> None:
    self._swaps: list[_Swap] = []

  @property
  def touched(self) -> tuple[str, ...]:
    """Qualified names that are bound to our objects now, including later imports by name."""
    found = []
    for swap in self._swaps:
      if isinstance(swap.home, ModuleType):
        found += [f"{module.__name__}.{name}" for module, name in _names_of(swap.new)]
        found += [f"{f.__module__}.{f.__qualname__}'s default" for f in _functions_with_default(swap.new)]
      else:
        found.append(f"{swap.home.__module__}.{swap.home.__qualname__}.{swap.name}")
    return tuple(found)

  def replace(self, module: ModuleType, path: str, function: Callable) -> None:
    """Replaces a function or a class of a module, also in other modules of MaxText and in defaults of its functions.

    `path` is `name` or `Class.name`. `function` returns the new class, given MaxText's; or it is called in a function's
    place, with MaxText's as the first argument.
    """
    of_class, _, name = path.rpartition(".")
    home: Any = getattr(module, of_class) if of_class else module
    old = vars(home)[name]
    new = function(old) if isinstance(old, type) else _called_in_place_of(old, function)
    self._swaps.append(_Swap(home=home, name=name, old=old, new=new))
    if of_class:
      setattr(home, name, new)
    else:
      _bind_everywhere(old, new)

  def changed_since(self) -> list[str]:
    """Returns names that other code has replaced after us: undoing ours would undo theirs."""
    # The last swap of each: a feature may replace what its patch point replaced.
    last = {(id(swap.home), swap.name): swap for swap in self._swaps}
    changed = [swap for swap in last.values() if vars(swap.home).get(swap.name) is not swap.new]
    return [f"{getattr(swap.home, '__qualname__', swap.home.__name__)}.{swap.name}" for swap in changed]

  def undo(self) -> None:
    """Restores everything that is still ours."""
    while self._swaps:
      swap = self._swaps.pop()
      if isinstance(swap.home, ModuleType):
        _bind_everywhere(swap.new, swap.old)
      elif vars(swap.home).get(swap.name) is swap.new:
        setattr(swap.home, swap.name, swap.old)


def _called_in_place_of(old: Callable, function: Callable) -> Callable:
  @functools.wraps(old)
  def new(*args: Any, **kwargs: Any) -> Any:
    return function(old, *args, **kwargs)

  return new


def _bind_everywhere(old: Any, new: Any) -> None:
  for module, name in _names_of(old):
    setattr(module, name, new)
  for function in _functions_with_default(old):
    function.__defaults__ = tuple(new if value is old else value for value in function.__defaults__ or ())


def _bound() -> list[tuple[ModuleType, str, Any]]:
  """(module, name, value) of all that modules of MaxText have now."""
  named = [module for name, module in sorted(sys.modules.items()) if name.split(".")[0] == "maxtext"]
  return [(module, *item) for module in named if module is not None for item in vars(module).items()]


def _names_of(target: Any) -> list[tuple[ModuleType, str]]:
  return [(module, name) for module, name, value in _bound() if value is target]


def _functions_with_default(target: Any) -> list[FunctionType]:
  functions = [inspect.unwrap(value) for _, _, value in _bound() if isinstance(value, FunctionType)]
  found = {id(each): each for each in functions if any(value is target for value in each.__defaults__ or ())}
  return list(found.values())

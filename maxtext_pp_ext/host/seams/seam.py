# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""What a seam is: what a module of MaxText must look like, and what is replaced in it."""

from collections.abc import Callable, Iterable, Iterator, Mapping
import dataclasses
from types import ModuleType
from typing import Any

from maxtext_pp_ext.config import derived
from maxtext_pp_ext.host.seams import rebind, version


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
  """Replacements that are made together or not at all.

  Attributes:
    name: what they are needed for, in a few words.
    checks: of the module, before anything is replaced.
    replaced: path in the module, `name` or `Class.name` -> what replaces it, see `Rebinding.replace`.
    refused_in: path of the function that refuses runs which need a missing part; "" if MaxText's own error will do.
    needs: whether a config needs the part.
  """

  name: str
  checks: tuple[version.Check, ...]
  replaced: Mapping[str, Callable]
  refused_in: str = ""
  needs: Callable[[Any], bool] = derived.runs_ours

  def check(self, module: ModuleType) -> None:
    for each in self.checks:
      each(module)

  def apply(self, module: ModuleType, rebinding: rebind.Rebinding) -> None:
    for path, new in self.replaced.items():
      rebinding.replace(module, path, new)

  def refuse(self, module: ModuleType, rebinding: rebind.Rebinding, why: str) -> None:
    """Makes a call of `refused_in` raise MissingFeatureError if its config needs the part."""

    def refusing(own: Callable, *args: Any, **kwargs: Any) -> Any:
      if any(map(self.needs, _configs([*args, *kwargs.values()]))):
        raise version.MissingFeatureError(self.name, why)
      return own(*args, **kwargs)

    if self.refused_in and rebind.is_there(module, self.refused_in):  # else nothing calls it
      rebinding.replace(module, self.refused_in, refusing)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seam:
  """One module's seam.

  Attributes:
    required: what every run of ours needs: the import of a module that looks different fails. None if there is none.
    features: parts that may be missing. Without one, a run that needs it is refused, and all others work.
  """

  required: Part | None = None
  features: tuple[Part, ...] = ()

  @property
  def purpose(self) -> str:
    """What it is needed for, in words."""
    return self.required.name if self.required else ", ".join(feature.name for feature in self.features)


def _configs(arguments: Iterable[Any]) -> Iterator[Any]:
  """The configs among arguments, and those of models among them."""
  for argument in arguments:
    model = getattr(argument, "model", argument)
    for found in (argument, *(getattr(each, "config", None) for each in (argument, model, getattr(model, "base", None)))):
      if hasattr(found, "pipeline_impl"):
        yield found

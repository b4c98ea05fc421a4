# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""What a patch point is: what a module of MaxText must look like, and what is replaced in it."""

from collections.abc import Callable, Iterable, Iterator, Mapping
import dataclasses
from types import ModuleType
from typing import Any

from maxtext_pp_ext.config import derived
from maxtext_pp_ext.host.patch_points import rebind, version


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
  """Replacements that are made together or not at all."""

  name: str  # what they are needed for
  checks: tuple[version.Check, ...]  # of the module, before anything is replaced
  replaced: Mapping[str, Callable]  # path in the module -> what replaces it, see `Rebinding.replace`
  refused_in: str = ""  # path of the function that refuses runs which need it; "" if MaxText's own error will do
  needs: Callable[[Any], bool] = derived.runs_ours  # whether a config needs it

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

    owner, _, name = self.refused_in.rpartition(".")
    if hasattr(getattr(module, owner, None) if owner else module, name):  # else nothing calls it
      rebinding.replace(module, self.refused_in, refusing)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PatchPoint:
  """One module's patch point."""

  # What every run of ours needs. The import of a module that looks different fails.
  required: Part | None = None
  # Parts that may be missing. Without one, a run that needs it is refused, and all others work.
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

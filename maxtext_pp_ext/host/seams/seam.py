# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""What a seam is: what a module of MaxText must look like, and what is replaced in it."""

from collections.abc import Callable
import dataclasses
from types import ModuleType

from maxtext_pp_ext.host.seams import rebind


def _nothing(module: ModuleType, rebinding: rebind.Rebinding | None = None) -> None:
  """A seam that is features only."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Feature:
  """A part of a seam that MaxText may lack.

  Attributes:
    name: what is missing without it, in a few words.
    check: raises HostVersionError unless the module looks as the feature expects; changes nothing.
    apply: makes the replacements.
    refuse: what is done instead, so that nothing goes without the feature silently; None if nothing has to be done.
  """

  name: str
  check: Callable[[ModuleType], None]
  apply: Callable[[ModuleType, rebind.Rebinding], None]
  refuse: Callable[[ModuleType, rebind.Rebinding, str], None] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seam:
  """One module's seam.

  Attributes:
    needed_for: what it is needed for, beside its features; "" if it is features only.
    check: raises HostVersionError unless the module looks as expected; changes nothing.
    apply: makes the replacements, everywhere in MaxText where the originals are bound already.
    features: further replacements, each of which may be missing.
  """

  needed_for: str = ""
  check: Callable[[ModuleType], None] = _nothing
  apply: Callable[[ModuleType, rebind.Rebinding], None] = _nothing
  features: tuple[Feature, ...] = ()

  @property
  def purpose(self) -> str:
    """What it is needed for, in words."""
    return self.needed_for or ", ".join(feature.name for feature in self.features)

  @property
  def optional(self) -> bool:
    """Whether it is features only: without its module, everything else works."""
    return not self.needed_for

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Guards: every seam checks here that this is the MaxText it was written for, before it changes anything.

All statements about MaxText in `host/` were read in MaxText 0.2.5.
"""

from collections.abc import Iterable
import inspect
import re
from types import ModuleType
from typing import Any

import maxtext_pp_ext
from maxtext_pp_ext.errors import SetupError

SUPPORTED = ">=0.2.5,<0.3"
_LEAST, _BELOW = (0, 2, 5), (0, 3)

_WAYS_OUT = (
    "Install a MaxText that is supported or a maxtext-pp-ext that supports this one; or set MAXTEXT_PP_EXT=off, or "
    "uninstall maxtext-pp-ext, to use this MaxText without it."
)


class HostVersionError(SetupError):
  """Our seams do not fit this MaxText; the message gives both versions and the difference.

  Attributes:
    difference: what was expected, and what was found.
  """

  def __init__(self, difference: str):
    self.difference = difference
    super().__init__(
        f"maxtext-pp-ext {maxtext_pp_ext.__version__} supports MaxText {SUPPORTED}, found MaxText {found_version()}: "
        f"{difference} {_WAYS_OUT}"
    )


class MissingFeatureError(SetupError):
  """A run needs a feature for which this MaxText looks different; the message says which, and what to do."""

  def __init__(self, feature: str, why: str):
    super().__init__(f"The run needs {feature}, which maxtext-pp-ext cannot give with this MaxText. {why}")


def found_version() -> str:
  """Returns the version that MaxText itself gives, 'unknown' if it gives none."""
  try:
    from maxtext import version  # pylint: disable=import-outside-toplevel

    return str(version.__version__)
  except (ImportError, AttributeError):
    return "unknown"


def check_version(found: str | None = None) -> None:
  """Raises HostVersionError unless MaxText's version is in the supported range.

  Args:
    found: the version; None for that of the MaxText that is installed. A development version counts as its release.
  """
  found = found_version() if found is None else found
  match = re.match(r"\d+(\.\d+)*", found)
  number = tuple(map(int, match.group().split("."))) if match else ()
  if not _LEAST <= number < _BELOW:
    raise HostVersionError("the version is outside that range.")


def attribute(owner: ModuleType | type, name: str) -> Any:
  """Returns `owner.name`. Raises HostVersionError, which says where it was expected, if it is missing."""
  try:
    return getattr(owner, name)
  except AttributeError:
    raise HostVersionError(f"expected {_qualified(owner)}.{name}, found nothing of that name.") from None


def check_signature(owner: ModuleType | type, name: str, *expected: str) -> None:
  """Raises HostVersionError unless `owner.name` takes the parameters that it has in one of the supported versions.

  Args:
    owner: the module or class.
    name: the function's name in it.
    expected: signatures without annotations, as in "(config, mesh, remat_policy=None, *, rngs)".
  """
  found = signature_text(attribute(owner, name))
  if found not in expected:
    raise HostVersionError(f"expected {_qualified(owner)}.{name}{' or '.join(expected)}, found {name}{found}.")


def check_parameters(owner: ModuleType | type, name: str, required: Iterable[str], known: Iterable[str]) -> None:
  """Raises HostVersionError unless `owner.name` takes all `required` parameters, and only `known` ones."""
  found = list(inspect.signature(attribute(owner, name)).parameters)
  missing = [parameter for parameter in required if parameter not in found]
  unknown = [parameter for parameter in found if parameter not in known]
  if missing or unknown:
    raise HostVersionError(
        f"expected {_qualified(owner)}.{name} with the parameters {', '.join(required)}, and no others than "
        f"{', '.join(known)}, found {name}{signature_text(attribute(owner, name))}."
    )


def check_calls(owner: ModuleType, name: str, called: str) -> None:
  """Raises HostVersionError unless the function `owner.name` uses the name `called`, which its module has."""
  attribute(owner, called)
  code = getattr(inspect.unwrap(attribute(owner, name)), "__code__", None)
  if code is None or called not in code.co_names:
    raise HostVersionError(f"expected {_qualified(owner)}.{name} to call {called}, found no such call in it.")


def signature_text(function: Any) -> str:
  """Returns a function's signature without annotations."""
  signature = inspect.signature(function)
  bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
  return str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))


def _qualified(owner: ModuleType | type) -> str:
  return owner.__name__ if isinstance(owner, ModuleType) else f"{owner.__module__}.{owner.__qualname__}"

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Checks, before anything is replaced, that this is the MaxText for which the replacements were written.

All statements about MaxText in `host/` were read in MaxText 0.2.5.
"""

from collections.abc import Callable, Iterable
import functools
import inspect
import operator
import re
from types import ModuleType
from typing import Any

import maxtext_pp_ext
from maxtext_pp_ext.errors import SetupError

Check = Callable[[ModuleType], None]  # raises HostVersionError unless a module looks as expected
SUPPORTED = ">=0.2.5,<0.3"
_LEAST, _BELOW = (0, 2, 5), (0, 3)

_WAYS_OUT = (
    "Install a MaxText that is supported or a maxtext-pp-ext that supports this one; or set MAXTEXT_PP_EXT=off, or "
    "uninstall maxtext-pp-ext, to use this MaxText without it."
)


class HostVersionError(SetupError):
  """Our patch points do not fit this MaxText; the message gives both versions and the difference."""

  def __init__(self, difference: str):
    self.difference = difference  # what was expected, and what was found
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
  """Raises HostVersionError unless a version, by default the installed MaxText's, is in the supported range.

  A development version counts as its release.
  """
  found = found_version() if found is None else found
  match = re.match(r"\d+(\.\d+)*", found)
  number = tuple(map(int, match.group().split("."))) if match else ()
  if not _LEAST <= number < _BELOW:
    raise HostVersionError("the version is outside that range.")


def attribute(module: ModuleType, path: str) -> Any:
  """Returns what a path in a module, `name` or `Class.name`, names. Raises HostVersionError if it is not there."""
  try:
    return operator.attrgetter(path)(module)
  except AttributeError:
    raise HostVersionError(f"expected {module.__name__}.{path}, found nothing of that name.") from None


def there(path: str) -> Check:
  """A check that a module has what a path names."""
  return functools.partial(attribute, path=path)


def signature(path: str, *expected: str) -> Check:
  """A check that a function has one of these signatures, without annotations, such as "(config, mesh=None, *, rngs)"."""

  def check(module: ModuleType) -> None:
    found = signature_text(attribute(module, path))
    if found not in expected:
      name = path.rpartition(".")[2]
      raise HostVersionError(f"expected {module.__name__}.{path}{' or '.join(expected)}, found {name}{found}.")

  return check


def parameters(path: str, required: Iterable[str], known: Iterable[str] | None = None) -> Check:
  """A check that a function takes all `required` parameters, and only `known` ones; None: any others."""

  def check(module: ModuleType) -> None:
    function = attribute(module, path)
    found = inspect.signature(function).parameters
    missing = [parameter for parameter in required if parameter not in found]
    unknown = [] if known is None else [parameter for parameter in found if parameter not in known]
    if missing or unknown:
      others = "" if known is None else f", and no others than {', '.join(known)}"
      raise HostVersionError(
          f"expected {module.__name__}.{path} with the parameters {', '.join(required)}{others}, found "
          f"{path.rpartition('.')[2]}{signature_text(function)}."
      )

  return check


def calls(path: str, called: str) -> Check:
  """A check that a function uses the name `called`, which its module has."""

  def check(module: ModuleType) -> None:
    attribute(module, called)
    code = getattr(inspect.unwrap(attribute(module, path)), "__code__", None)
    if code is None or called not in code.co_names:
      raise HostVersionError(f"expected {module.__name__}.{path} to call {called}, found no such call in it.")

  return check


def signature_text(function: Any) -> str:
  """Returns a function's signature without annotations."""
  found = inspect.signature(function)
  bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in found.parameters.values()]
  return str(found.replace(parameters=bare, return_annotation=inspect.Signature.empty))

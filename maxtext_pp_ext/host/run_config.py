# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""MaxText's config for the arguments of a run, read without ending the process."""

from collections.abc import Sequence
import importlib.util
import pathlib
from typing import Any


def maxtext_folder() -> pathlib.Path:
  """Where MaxText is installed, without importing it. Raises ModuleNotFoundError if it is not."""
  spec = importlib.util.find_spec("maxtext")
  if spec is None or spec.origin is None:
    raise ModuleNotFoundError("No module named 'maxtext'", name="maxtext")
  return pathlib.Path(spec.origin).parent


def base_yml() -> pathlib.Path:
  """MaxText's own base.yml."""
  return maxtext_folder() / "configs" / "base.yml"


def read(arguments: Sequence[str], **overrides: Any) -> Any:
  """MaxText's config.

  Args:
    arguments: those of its trainers: a yml file, which may be left out for base.yml, then `key=value`.
    **overrides: values for keys instead of those of the arguments.

  Raises:
    ValueError: MaxText, or this package, does not accept it; with every reason.
  """
  from maxtext.configs import pyconfig  # pylint: disable=import-outside-toplevel
  import pydantic  # pylint: disable=import-outside-toplevel

  arguments = list(arguments)
  if not arguments or "=" in arguments[0]:
    arguments.insert(0, str(base_yml()))
  # Not `initialize`: that ends the process where it finds an error (MaxText 0.2.5).
  try:
    return pyconfig.HyperParameters(pyconfig._initialize_pydantic(["", *arguments], **overrides))  # pylint: disable=protected-access
  except pydantic.ValidationError as error:  # whose own text has all of the config
    details = error.errors(include_url=False, include_input=False)
    raise ValueError("\n".join(_text(detail) for detail in details)) from None


def given_keys(argv: Sequence[str]) -> dict[str, Any]:
  """The keys of MaxText's arguments, of the yml file and those it is based on too, as MaxText merges them."""
  from maxtext.configs import pyconfig  # pylint: disable=import-outside-toplevel
  import omegaconf  # pylint: disable=import-outside-toplevel

  path, assignments = pyconfig._resolve_or_infer_config(["", *argv])  # pylint: disable=protected-access
  file = pyconfig._load_config(path)  # pylint: disable=protected-access
  merged = omegaconf.OmegaConf.merge(file, omegaconf.OmegaConf.from_cli(list(assignments)))
  return omegaconf.OmegaConf.to_container(merged, resolve=True)


def _text(detail: dict[str, Any]) -> str:
  message = detail["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
  keys = ".".join(map(str, detail["loc"]))
  return f"{keys}: {message}" if keys else message

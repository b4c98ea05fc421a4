# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""MaxText's config of its command-line arguments, with an exception where MaxText would end the process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def new_config(argv: Sequence[str], **overrides: Any) -> Any:
  """MaxText's config.

  Args:
    argv: a yml file, which may be left out for base.yml, then `key=value`.
    **overrides: values for keys instead of those of `argv`.

  Raises:
    ValueError: MaxText, or this package (`PipelineConfigError`), does not accept it; the message has what is wrong, and
      not the whole config as pydantic's has.
  """
  from maxtext.configs import pyconfig  # pylint: disable=import-outside-toplevel
  import pydantic  # pylint: disable=import-outside-toplevel

  # Not `initialize`: that ends the process where it finds an error.
  try:
    return pyconfig.HyperParameters(pyconfig._initialize_pydantic(["", *argv], **overrides))  # pylint: disable=protected-access
  except pydantic.ValidationError as error:
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

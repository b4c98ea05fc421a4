# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Writes a run's config into a yml file that MaxText reads."""

from collections.abc import Mapping, Sequence
import os
import pathlib
from typing import Any

from maxtext_pp_ext.config.keys import PipelineKeys
from maxtext_pp_ext.config.view import plain
from maxtext_pp_ext.host.models import run_config

# They say what to compile for; a run has its devices.
_OF_TARGET = ("compile_topology", "compile_topology_num_slices", "internal_compile", "internal_compile_num_devices")


def write(path: pathlib.Path, argv: Sequence[str], keys: Mapping[str, Any], devices: int, comment: str) -> None:
  """Writes the run of MaxText's arguments `argv`, with other values of `keys`, into a new file, based on argv's yml file.

  `comment` has the lines above the keys. `devices` is the number of devices of the run. Raises OSError if the file exists
  or cannot be written. Raises ValueError, and writes nothing, if MaxText would read other values from the file.
  """
  import yaml  # pylint: disable=import-outside-toplevel

  base, assigned = _base_and_assigned(argv, path)
  given = {key: field.default for key, field in PipelineKeys.model_fields.items()} | run_config.given_keys(argv)
  changed = {key: value for key, value in keys.items() if key in assigned or given.get(key) != value}
  content = {"base_config": base} | {key: value for key, value in (assigned | changed).items() if key not in _OF_TARGET}
  text = "".join(f"# {line}\n" for line in comment.splitlines())
  with path.open("x", encoding="utf-8") as file:
    file.write(text + yaml.safe_dump(content, sort_keys=False, allow_unicode=True))
  try:
    _check(path, run_config.with_keys(argv, keys), content, devices)
  except BaseException:
    path.unlink()
    raise


def _base_and_assigned(argv: Sequence[str], path: pathlib.Path) -> tuple[str, dict[str, Any]]:
  """(what the file is based on, the keys of the command line with their values)."""
  from maxtext.configs import pyconfig  # pylint: disable=import-outside-toplevel
  import omegaconf  # pylint: disable=import-outside-toplevel

  base, assignments = "base.yml", list(argv)
  if argv and "=" not in argv[0]:
    given = pathlib.Path(pyconfig.resolve_config_path(argv[0])).resolve()
    configs = run_config.base_yml().parent.resolve()
    within = given.is_relative_to(configs)
    base = str(given.relative_to(configs) if within else os.path.relpath(given, path.absolute().parent.resolve()))
    assignments = assignments[1:]
  assigned: Any = omegaconf.OmegaConf.to_container(omegaconf.OmegaConf.from_cli(assignments), resolve=False)
  return base, {str(key): value for key, value in assigned.items()}


def _check(path: pathlib.Path, argv: Sequence[str], content: Mapping[str, Any], devices: int) -> None:
  """Raises ValueError unless MaxText reads the same from the file as from arguments."""
  target = [argument for argument in argv if argument.partition("=")[0] in _OF_TARGET]
  has_topology = run_config.given_keys(argv).get("compile_topology")
  overrides: Any = {} if has_topology else {"internal_compile": True, "internal_compile_num_devices": devices}
  wanted = run_config.read_without_run(argv, **overrides)
  found = run_config.read_without_run([str(path), *target], **overrides)
  compared = content.keys() - {"base_config", *run_config.WITHOUT_RUN}  # these are others while a config is looked at
  differ = sorted(key for key in compared if plain(getattr(found, key, None)) != plain(getattr(wanted, key, None)))
  if differ:
    raise ValueError(
        f"{path} is not written: from a file MaxText would read other values of {', '.join(differ)} than from its "
        "command line, since the model's own yml file comes after a file. Give these keys on the command line."
    )

# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads MaxText's config for the arguments of a run, and writes it into a yml file; makes its pipeline's schedule."""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import importlib.util
import math
import os
import pathlib
import re
from typing import Any

from maxtext_pp_ext import registry
from maxtext_pp_ext.config import derived, PipelineConfigError, ranges, remedies
from maxtext_pp_ext.config.host_keys import HostKeys
from maxtext_pp_ext.config.keys import PipelineKeys
from maxtext_pp_ext.config.view import plain, with_values
from maxtext_pp_ext.errors import SetupError
from maxtext_pp_ext.host.models import cycles
from maxtext_pp_ext.nearest import did_you_mean
from maxtext_pp_ext.schedule import CircularSchedule, Schedule

MOST_DEVICES = 1 << 20  # a mesh of more is a mistake
_MOST_CHOICES = 20  # for a key that are listed
_LONGEST_VALUE = 80  # that is repeated in an error
# They say what to compile for; a run has its devices.
_OF_TARGET = ("compile_topology", "compile_topology_num_slices", "internal_compile", "internal_compile_num_devices")
PARALLELISM = re.compile(r"(ici|dcn)_\w+_parallelism")


@contextlib.contextmanager
def as_value_errors(what: str) -> Iterator[None]:
  """Turns the errors that MaxText and its dependencies raise about a config into "MaxText cannot {what}: …".

  MaxText validates only some of its keys. Other bad values fail somewhere in its code: with AssertionError,
  ZeroDivisionError, AttributeError, RecursionError and more (0.2.5). Errors whose message is for people pass unchanged.
  """
  try:
    yield
  except (ValueError, NotImplementedError, OSError, ImportError, SetupError):
    raise
  except Exception as error:
    cause: BaseException | None = error
    while cause is not None:  # OmegaConf replaces an exception that a signal raised within it
      if isinstance(cause, KeyboardInterrupt):
        raise cause from None
      cause = cause.__context__
    text = str(error).strip()
    raise ValueError(f"MaxText cannot {what}: {type(error).__name__}{': ' if text else ''}{text}") from error


def integer(given: Mapping[str, Any], key: str, default: int = 1) -> int:
  """The whole number that arguments give for a key, not yet validated by MaxText. Raises ValueError if it is none."""
  value = given.get(key, default)
  try:
    return int(value)
  except (TypeError, ValueError, OverflowError):
    raise ValueError(f"{key}={value!r} must be a whole number.") from None


def maxtext_folder() -> pathlib.Path:
  """Where MaxText is installed, without importing it. Raises ModuleNotFoundError if it is not installed."""
  if (spec := importlib.util.find_spec("maxtext")) is None or spec.origin is None:
    raise ModuleNotFoundError("No module named 'maxtext'", name="maxtext")
  return pathlib.Path(spec.origin).parent


def base_yml() -> pathlib.Path:
  return maxtext_folder() / "configs" / "base.yml"


def read(arguments: Sequence[str], **overrides: Any) -> Any:
  """MaxText's config.

  `arguments` are those of its trainers: a yml file, which may be left out for MaxText's defaults, then `key=value`.
  `overrides` has values for keys instead of those. Raises ValueError with every reason of MaxText or this package.
  """
  from maxtext.configs import pyconfig  # pylint: disable=import-outside-toplevel

  # Not `initialize`: it ends the process if it finds an error (MaxText 0.2.5).
  make = pyconfig._initialize_pydantic  # pylint: disable=protected-access
  return _made(make, ["", *arguments], **{"config_class": _JudgedClass(), **overrides})


def _made(make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
  """The config that a function makes a pydantic model of. Raises ValueError with every reason against it."""
  from maxtext.configs import pyconfig  # pylint: disable=import-outside-toplevel
  import pydantic  # pylint: disable=import-outside-toplevel

  try:
    with as_value_errors("read this config"):
      return pyconfig.HyperParameters(make(*args, **kwargs))
  except pydantic.ValidationError as error:  # its own text repeats the whole config
    raise ValueError("\n".join(map(_text, error.errors(include_url=False)))) from None


def refuse_numbers(given: Mapping[str, Any]) -> None:
  """Raises PipelineConfigError if a key's number has no meaning. MaxText would compute with it."""
  from maxtext.configs import types  # pylint: disable=import-outside-toplevel

  if found := ranges.problems(types.MaxTextConfig.model_fields, given):
    raise PipelineConfigError(found)


class _JudgedClass:
  """MaxText's config class, which judges numbers first."""

  def __init__(self) -> None:
    from maxtext.configs import types  # pylint: disable=import-outside-toplevel

    self.of_host = types.MaxTextConfig
    self.given: dict[str, Any] = {}  # the values of the last call
    # MaxText reads the fields of the class that it is to make, and calls it with all values.
    self.model_fields = self.of_host.model_fields

  def __call__(self, **given: Any) -> Any:
    self.given = given
    refuse_numbers(given)
    return self.of_host(**given)


class Variations:
  """A config whose files are read once, which takes a second, and which is made anew with other values of some keys."""

  def __init__(self, arguments: Sequence[str]):
    """Reads the arguments as `read_without_run` does."""
    self._class = _JudgedClass()
    self.first = read_without_run(arguments, config_class=self._class)
    self._given = self._class.given

  def read(self, changed: Mapping[str, Any]) -> Any:
    """The config with these values instead of its own. Raises ValueError with every reason, and no remedies."""
    refuse_numbers(changed)  # the others have been judged
    with remedies.not_wanted():
      return _made(self._class.of_host, **{**self._given, **changed})


# Turns off what a run starts, writes or prints; reading a config needs none of it.
WITHOUT_RUN = {"skip_jax_distributed_system": True, "log_config": False, "enable_checkpointing": False, "run_name": "x"}


def read_without_run(arguments: Sequence[str], **overrides: Any) -> Any:
  """Calls `read` to look at a config: connects no processes, and writes nothing. Keys on the command line stay."""
  on_command_line = {argument.partition("=")[0] for argument in arguments if "=" in argument}
  given = given_keys(arguments)  # a topology is one slice unless they say otherwise
  if given.get("compile_topology") and given.get("compile_topology_num_slices", -1) == -1:
    overrides = {"compile_topology_num_slices": 1} | overrides
  quiet = {key: value for key, value in WITHOUT_RUN.items() if key not in on_command_line}
  return read(arguments, **quiet | overrides)


def of_absent_devices(given: Mapping[str, Any], devices: int | None = None) -> dict[str, Any]:
  """Values of keys that let MaxText assume a run's devices; {} if `compile_topology` names them.

  `devices` is their number, by default what the parallelism makes. There -1 takes what is left and counts as 1, and as 2
  for stages, whose number MaxText does not derive: a pipeline was asked for. Raises ValueError if the parallelism is no
  number, or too large, or if both say which devices.
  """
  if topology := given.get("compile_topology"):
    if devices:
      raise ValueError(f"--devices {devices} with compile_topology={topology}: give one of them.")
    return {}
  if not devices:
    sizes = {key: integer(given, key) for key in given if PARALLELISM.fullmatch(key)}
    sizes |= {key: 2 for key, size in sizes.items() if size == -1 and key.endswith("_pipeline_parallelism")}
    sizes = {key: size for key, size in sizes.items() if size > 1}
    devices = math.prod(sizes.values())
    if devices > MOST_DEVICES:
      product = " × ".join(f"{key}={size}" for key, size in sizes.items())
      raise ValueError(f"{product} asks for {devices} devices, more than {MOST_DEVICES}. Set smaller ones.")
  return {"internal_compile": True, "internal_compile_num_devices": devices}


def with_keys(argv: Sequence[str], values: Mapping[str, Any]) -> list[str]:
  """MaxText's arguments with these values instead of their own."""
  kept = [argument for argument in argv if argument.partition("=")[0] not in values]
  return [*kept, *(f"{key}={value}" for key, value in values.items())]


def given_keys(argv: Sequence[str]) -> dict[str, Any]:
  """Key -> value of arguments and yml files, merged as MaxText does. Raises ValueError or OSError if unreadable."""
  from maxtext.configs import pyconfig  # pylint: disable=import-outside-toplevel
  import omegaconf  # pylint: disable=import-outside-toplevel

  # pylint: disable=protected-access
  with as_value_errors("read this config"):
    path, assignments = pyconfig._resolve_or_infer_config(["", *argv])
    merged = omegaconf.OmegaConf.merge(pyconfig._load_config(path), omegaconf.OmegaConf.from_cli(list(assignments)))
    found: Any = omegaconf.OmegaConf.to_container(merged, resolve=True)  # a dict, though its types allow more
    return {str(key): value for key, value in found.items()}


def _text(detail: Mapping[str, Any]) -> str:
  message = detail["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
  keys, value = ".".join(map(str, detail["loc"])), detail["input"]
  choices = re.findall(r"'([^']*)'", detail.get("ctx", {}).get("expected", ""))
  if len(choices) > _MOST_CHOICES:
    return f"{keys}={value} is none of {len(choices)} choices{did_you_mean(value, choices, 5)}"
  given = f"={value}" if isinstance(value, str | int | float) and len(str(value)) <= _LONGEST_VALUE else ""
  return f"{keys}{given}: {message}" if keys else message


def schedule_of(config: HostKeys) -> Schedule:
  """The schedule of the config's pipeline.

  Without a pipeline, it is that of all layers, or blocks of layers, as repeats of the only stage. Models with several
  stacks of layers, such as DeepSeek's, run one such schedule for each of them. Raises ValueError if stages, microbatches
  and repeats do not fit together, UnknownImplementationError or PluginError if there is no such implementation.
  """
  name = derived.pipeline_impl(config)
  if derived.windowed(config):
    blocks, _ = cycles.scanned(config)
    config = with_values(config, derived.keys_of_window(config, blocks))
  schedule_class = CircularSchedule if name == registry.HOST else registry.get(name).contract.schedule_class
  return schedule_class.of_config(config)


def write(path: pathlib.Path, argv: Sequence[str], keys: Mapping[str, Any], devices: int, comment: str) -> None:
  """Writes the run of MaxText's arguments `argv`, with other values of `keys`, into a new file, based on argv's yml file.

  `comment` has the lines above the keys. `devices` is the number of devices of the run. Raises OSError if the file exists
  or cannot be written. Raises ValueError, and writes nothing, if MaxText would read other values from the file.
  """
  import yaml  # pylint: disable=import-outside-toplevel

  base, assigned = _base_and_assigned(argv, path)
  given = {key: field.default for key, field in PipelineKeys.model_fields.items()} | given_keys(argv)
  changed = {key: value for key, value in keys.items() if key in assigned or given.get(key) != value}
  content = {"base_config": base} | {key: value for key, value in (assigned | changed).items() if key not in _OF_TARGET}
  text = "".join(f"# {line}\n" for line in comment.splitlines())
  with path.open("x", encoding="utf-8") as file:
    file.write(text + yaml.safe_dump(content, sort_keys=False, allow_unicode=True))
  try:
    _check(path, with_keys(argv, keys), content, devices)
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
    configs = base_yml().parent.resolve()
    within = given.is_relative_to(configs)
    base = str(given.relative_to(configs) if within else os.path.relpath(given, path.absolute().parent.resolve()))
    assignments = assignments[1:]
  assigned: Any = omegaconf.OmegaConf.to_container(omegaconf.OmegaConf.from_cli(assignments), resolve=False)
  return base, {str(key): value for key, value in assigned.items()}


def _check(path: pathlib.Path, argv: Sequence[str], content: Mapping[str, Any], devices: int) -> None:
  """Raises ValueError unless MaxText reads the same from the file as from arguments."""
  target = [argument for argument in argv if argument.partition("=")[0] in _OF_TARGET]
  has_topology = given_keys(argv).get("compile_topology")
  overrides: Any = {} if has_topology else {"internal_compile": True, "internal_compile_num_devices": devices}
  wanted = read_without_run(argv, **overrides)
  found = read_without_run([str(path), *target], **overrides)
  compared = content.keys() - {"base_config", *WITHOUT_RUN}  # these are others while a config is looked at
  if differ := sorted(key for key in compared if plain(getattr(found, key, None)) != plain(getattr(wanted, key, None))):
    raise ValueError(
        f"{path} is not written: from a file MaxText would read other values of {', '.join(differ)} than from its "
        "command line, since the model's own yml file comes after a file. Give these keys on the command line."
    )

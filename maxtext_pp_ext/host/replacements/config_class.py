# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""MaxText's config classes with our keys: subclasses that check them with MaxText's derived values."""

from collections.abc import Callable, Mapping
import functools
import os
from typing import Any
import warnings

import pydantic

from maxtext_pp_ext import config as keys
from maxtext_pp_ext import registry
from maxtext_pp_ext.config import derived, ranges, remedies
from maxtext_pp_ext.config.keys import Keys
from maxtext_pp_ext.host import extension_groups
from maxtext_pp_ext.host.models.cycles import subclass
from maxtext_pp_ext.host.replacements import defaults
from maxtext_pp_ext.host.rules import parameter_patterns
from maxtext_pp_ext.host.rules import problems as rules

# MaxText's config classes -> the method in which each derives and validates, a pydantic "after" validator.
VALIDATORS = {"MaxTextConfig": "set_derived_and_validate_values", "RLConfig": "set_derived_values_and_validate"}


def extend_config_class(base: type[pydantic.BaseModel]) -> type:
  """Returns the subclass of `types.MaxTextConfig` or `types.RLConfig` that has our keys and checks them; idempotent."""
  if issubclass(base, keys.PipelineKeys):
    return base  # a patched MaxText found our entry point twice
  kind = next(name for name, validator in VALIDATORS.items() if hasattr(base, validator))
  derive, problems = getattr(base, VALIDATORS[kind]), _rl_problems if kind == "RLConfig" else _problems

  # A subclass's validator replaces the base's validator of the same name, so we call the base's ourselves.
  @functools.wraps(derive)
  def derive_and_check(self):
    return _derive_and_check(self, derive, problems)

  @functools.wraps(base.__init__)
  def __init__(self, **data):
    # pydantic turns a ValueError from a validator into a ValidationError that also prints the whole input.
    try:
      base.__init__(self, **data)
    except pydantic.ValidationError as error:
      for detail in error.errors(include_url=False, include_input=False):
        cause = detail.get("ctx", {}).get("error")
        if isinstance(cause, keys.PipelineConfigError):
          raise cause from cause.__cause__
      raise

  before = classmethod(_read_environment)
  validators = {
      "read_pipeline_environment": pydantic.model_validator(mode="before")(before),  # type: ignore[arg-type]  # it takes them
      VALIDATORS[kind]: pydantic.model_validator(mode="after")(derive_and_check),
  }
  return subclass(base, keys.PipelineKeys, __init__=__init__, **validators)


def _read_environment(cls, values: Any) -> Any:
  """Adds keys that only the environment, where MaxText reads no keys of ours, or the process's default sets."""
  del cls
  if isinstance(values, Mapping):
    of_keys = {key: f"M_{key.upper()}" for key in keys.PipelineKeys.model_fields if key not in values}
    found = {key: os.environ[name] for key, name in of_keys.items() if name in os.environ}
    values = {**values, **found} if found else values
  return defaults.apply_default_pipeline_impl(values)


def _derive_and_check(config: Any, derive: Callable[[Any], Any], problems: Callable[..., list[str]]) -> Any:
  """Lets MaxText derive and validate. If both MaxText and we find problems, our error is raised from MaxText's."""
  asks_for_us = config.pipeline_impl != registry.HOST or config.sharding_conflicts != "fallback"
  if asks_for_us and (problem := extension_groups.problem()):
    raise keys.PipelineConfigError([problem])
  if config.pipeline_impl != registry.HOST and (found := ranges.problems(type(config).model_fields, vars(config))):
    raise keys.PipelineConfigError(found)  # MaxText would compute with these numbers, and so would the rules
  given = {key: getattr(config, key) for key in remedies.DERIVED if hasattr(config, key)}
  try:
    derived = derive(config)
  except Exception as error:
    if found := problems(config, given):
      raise keys.PipelineConfigError(found) from error
    raise
  found = problems(derived, given)
  if found:
    raise keys.PipelineConfigError(found)
  # What only a mesh of fewer devices avoids: MaxText's own error, later, says less.
  if found := problems(derived, given, whole_mesh=True):
    text = "\n".join(["With a mesh of all devices this cannot be trained:", *found])
    warnings.warn(text, keys.PipelineConfigWarning, stacklevel=2)
  return derived


def _problems(config: Keys, given: Mapping[str, Any], whole_mesh: bool = False) -> list[str]:
  found = rules.problems(config, given, whole_mesh)
  # Patterns are judged on models, and a config with problems may have no model. Without a pipeline paths are MaxText's.
  unchanged = config.pipeline_impl == registry.HOST or derived.windowed(config)
  if found or whole_mesh or unchanged or not any(getattr(config, key, None) for key in parameter_patterns.KEYS):
    return found
  from maxtext.configs import pyconfig  # pylint: disable=import-outside-toplevel

  return parameter_patterns.problems(pyconfig.HyperParameters(config))


def _rl_problems(config: Keys, given: Mapping[str, Any], whole_mesh: bool = False) -> list[str]:
  del given, whole_mesh
  if config.pipeline_impl == registry.HOST:
    return rules.problems(config)
  return [
      f"pipeline_impl={config.pipeline_impl!r} with an RL trainer: MaxText's RLConfig derives no stages, repeats or "
      "microbatches, so its RL trainers never run a pipeline. Set pipeline_impl=host."
  ]

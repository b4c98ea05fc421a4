# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Where a config is refused: all rules about it, each in the module of its subject.

`problems` reads any object that has MaxText's keys as attributes, so that it can be tested, and reused by tools, without
MaxText. It wants the values as MaxText has derived them: -1 and None that are left mean "not derived (yet)" and are not
judged.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from maxtext_pp_ext import registry
from maxtext_pp_ext.config import keys, remedies
from maxtext_pp_ext.config.keys import Keys
from maxtext_pp_ext.host.rules import (
    checkpoint_paths,
    meshes,
    optimizer,
    per_microbatch,
    pipelined_path,
    propose,
    quantization,
    sizes,
)

# Host key -> what it is asked for instead. They choose how long gathered weights stay, as pipeline_impl does.
_CONTRADICTING_HOST_KEYS = {"pipeline_fsdp_ag_once": "circular_ag_once", "pipeline_fsdp_ag_per_repeat": "circular_bsw"}


def problems(config: Keys, given: Mapping[str, Any] | None = None, whole_mesh: bool = False) -> list[str]:
  """Everything that is wrong with our keys, and with MaxText's keys under an implementation of ours; [] if nothing.

  Args:
    config: MaxText's, or anything with its keys.
    given: what the user has given for `remedies.DERIVED`, if the config has what was derived from it.
    whole_mesh: whether the mesh is one of all devices, as the trainers make it, and the tests of models need not.
  """
  if config.pipeline_impl == registry.HOST:
    return _of_host(config)
  found = _of_implementations(config)
  # Nobody makes a smaller mesh of devices that are not there.
  if (
      whole_mesh
      or (found and _devices_are_absent(config))
      or any(isinstance(problem, remedies.Problem) for problem in found)
  ):
    found += sizes.devices(config)

  def check(view: Keys) -> list[str]:
    if view.pipeline_impl == registry.HOST:
      return _of_host(view)
    return [*_of_implementations(view), *sizes.devices(view)]

  return remedies.with_remedies(config, found, check, propose.proposal, given)


def _devices_are_absent(config: Keys) -> bool:
  return bool(getattr(config, "internal_compile", False) or getattr(config, "compile_topology", ""))


def _of_host(config: Keys) -> list[str]:
  return [*_bad_choices(config), *_keys_without_effect(config)]


def _of_implementations(config: Keys) -> list[str]:
  """What is wrong with an implementation of ours."""
  return [
      *_unknown_implementation(config),
      *_bad_choices(config),
      *_contradicting_host_keys(config),
      *sizes.problems(config),
      *meshes.problems(config),
      *optimizer.problems(config),
      *quantization.problems(config),
      *pipelined_path.problems(config),
      *per_microbatch.problems(config),
      # What is only compiled writes no checkpoint.
      *([] if _devices_are_absent(config) else checkpoint_paths.problems(lambda key: getattr(config, key, None))),
  ]


def _bad_choices(config: Keys) -> Iterator[str]:
  for key, choices in keys.CHOICES.items():
    value = getattr(config, key)
    if value not in choices:
      default = keys.PipelineKeys.model_fields[key].default
      yield f"{key}={value!r} must be one of {', '.join(map(repr, choices))}. Set {key}={default} unless you know better."


def _keys_without_effect(config: Keys) -> Iterator[str]:
  for key, choices in keys.CHOICES.items():
    value = getattr(config, key)
    if "auto" in choices and value != "auto" and value in choices:
      yield (
          f"{key}={value} has no effect with pipeline_impl=host. Set pipeline_impl to one of "
          f"{', '.join(name for name in registry.names() if name != registry.HOST)}, or leave {key} out."
      )


def _unknown_implementation(config: Keys) -> Iterator[str]:
  try:
    registry.get(config.pipeline_impl)
  except registry.UnknownImplementationError as error:
    yield f"{error} {remedies.LEAVE_OUT}"


def _contradicting_host_keys(config: Keys) -> Iterator[str]:
  for key, instead in _CONTRADICTING_HOST_KEYS.items():
    if getattr(config, key):
      yield (
          f"{key}=True together with pipeline_impl={config.pipeline_impl}: both say how long gathered weights stay. Set "
          f"{key}=False; pipeline_impl={instead} does what {key} is for."
      )

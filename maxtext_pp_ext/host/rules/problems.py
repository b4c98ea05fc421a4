# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""All rules that refuse a config.

They read any object with MaxText's keys as attributes, and expect the values that MaxText has derived. A remaining -1 or
None means "not derived (yet)" and is not judged.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from maxtext_pp_ext import registry
from maxtext_pp_ext.config import derived, keys, remedies
from maxtext_pp_ext.config.keys import Keys
from maxtext_pp_ext.host.rules import (
    candidates,
    checkpoint_paths,
    meshes,
    optimizer,
    per_microbatch,
    pipelined_path,
    quantization,
    sizes,
    windowed_path,
)

_MOST_REMEDIES = 4  # that are printed
# Host key -> the pipeline_impl that replaces it. Both choose how long gathered weights stay.
_CONTRADICTING_HOST_KEYS = {"pipeline_fsdp_ag_once": "circular_ag_once", "pipeline_fsdp_ag_per_repeat": "circular_bsw"}


def problems(config: Keys, given: Mapping[str, Any] | None = None, whole_mesh: bool = False) -> list[str]:
  """All problems with our keys, and with MaxText's keys under one of our implementations.

  `given` has the user's values of the keys in `remedies.DERIVED`, if the config holds derived values instead.
  `whole_mesh` says that the mesh has all devices. A trainer's mesh has; a mesh in a test of models may have fewer.
  """
  if config.pipeline_impl == registry.HOST:
    return _of_host(config)
  found = list(_of_implementations(config))
  # A mesh of absent devices always has all of them.
  all_there = whole_mesh or (found and _devices_are_absent(config))
  if all_there or any(isinstance(problem, remedies.Problem) for problem in found):
    found += sizes.devices(config)
  of_ours = lambda view: [*_of_implementations(view), *sizes.devices(view)]
  check = lambda view: _of_host(view) if view.pipeline_impl == registry.HOST else of_ours(view)
  return _with_remedies(config, found, check, given)


def of_mesh(config: Keys, given: Mapping[str, Any]) -> list[str]:
  """The problems with a mesh of all devices, with any pipeline or none; `given` has the run's keys before derivation."""
  chosen = {key: given[key] for key in remedies.DERIVED if isinstance(given.get(key), int)}
  if config.pipeline_impl != registry.HOST:
    return problems(config, chosen, whole_mesh=True)
  check = lambda view: [*(sizes.problems(view) if derived.num_stages(view) != 1 else []), *sizes.devices(view)]
  # MaxText judges the sizes of its own pipelines, except that it takes -1 stages for none.
  found = list(sizes.devices(config)) if derived.num_stages(config) is not None else check(config)
  return _with_remedies(config, found, check, chosen)


def refuse_mesh(config: Keys, given: Mapping[str, Any]) -> None:
  """Raises PipelineConfigError if `of_mesh` has problems: MaxText's own error names no key."""
  if found := of_mesh(config, given):
    raise keys.PipelineConfigError(found)


def _devices_are_absent(config: Keys) -> bool:
  return bool(getattr(config, "internal_compile", False) or getattr(config, "compile_topology", ""))


def _of_host(config: Keys) -> list[str]:
  return [
      *_bad_choices(config),
      *_keys_without_effect(config),
      *meshes.unknown_topology(getattr(config, "compile_topology", "")),
  ]


def _of_implementations(config: Keys) -> Iterator[str]:
  try:
    registry.get(config.pipeline_impl)
  except registry.UnknownImplementationError as error:
    yield f"{error} {remedies.LEAVE_OUT}"
  yield from _bad_choices(config)
  for key, instead in _CONTRADICTING_HOST_KEYS.items():
    if getattr(config, key):
      yield (
          f"{key}=True together with pipeline_impl={config.pipeline_impl}: both choose how long gathered weights stay. "
          f"Set {key}=False; pipeline_impl={instead} does what {key} is for."
      )
  is_window = derived.windowed(config)
  of_path = (windowed_path,) if is_window else (optimizer, pipelined_path)
  several = (per_microbatch,) if not is_window or config.num_pipeline_microbatches > 1 else ()
  for rules in (sizes, meshes, quantization, *of_path, *several):
    yield from rules.problems(config)
  yield from sizes.rematerialised(config)
  if not _devices_are_absent(config):  # a run that only compiles writes no checkpoint
    yield from checkpoint_paths.problems(lambda key: getattr(config, key, None))


def _bad_choices(config: Keys) -> Iterator[str]:
  for key, choices in keys.CHOICES.items():
    if (value := getattr(config, key)) not in choices:
      default = keys.PipelineKeys.model_fields[key].default
      yield f"{key}={value!r} must be one of {', '.join(map(repr, choices))}. Set {key}={default}, for instance."


def _keys_without_effect(config: Keys) -> Iterator[str]:
  of_ours = [key for key, choices in keys.CHOICES.items() if "auto" in choices]
  for key in (*of_ours, "pipeline_remat_iterations", "pipeline_remat_tensors"):
    if (value := getattr(config, key)) and value != "auto" and value in keys.CHOICES.get(key, (value,)):
      yield (
          f"{key}={value} has no effect with pipeline_impl=host. Set pipeline_impl to one of "
          f"{', '.join(name for name in registry.names() if name != registry.HOST)}, or leave {key} out."
      )


def _of_layers_outside(
    config: Keys, proposal: remedies.Values, accepts: Callable[[remedies.Values], bool], given: remedies.Values
) -> str:
  """Says which layers a proposal leaves out of the pipeline, and how all of them would run without one; "" for none."""
  kept, available = proposal.get("pipeline_parallel_layers", -1), derived.layers_to_choose_from(config)
  if kept == -1 or available is None:
    return ""
  text = f" That leaves {available - kept} of {available} layers out of the pipeline, on every stage."
  none = {f"{network}_pipeline_parallelism": 1 for network in derived.NETWORKS}
  none |= derived.WITHOUT_PIPELINE | {"num_pipeline_microbatches": -1}
  changes = {key: value for key, value in none.items() if given.get(key, getattr(config, key)) != value}
  return f"{text} Without a pipeline: {remedies.settings(changes)}." if accepts(changes) else text


def _kind(config: Keys, remedy: remedies.Remedy) -> Any:
  """What makes a remedy like another one: the same keys, changed to either side, with the same remark."""

  def is_more(key: str, value: Any) -> bool:
    present = getattr(config, key, None)
    return isinstance(value, (int, float)) and value > (present if isinstance(present, (int, float)) else 0)

  return (*((key, is_more(key, value)) for key, value in remedy.values.items()), remedy.remark)


def _with_remedies[C: Keys](
    config: C, found: Sequence[str], problems: Callable[[C], Sequence[str]], given: remedies.Values | None = None
) -> list[str]:
  """The texts of a config's problems, with each remedy that is enough alone, or with one for all problems together.

  `problems` finds those of another config, and `given` is as for `changed`.
  """
  if not (of_sizes := [problem for problem in found if isinstance(problem, remedies.Problem)]):
    return list(found)

  def accepts(values: remedies.Values) -> bool:
    left = problems(remedies.changed(config, values, given))
    return not any(isinstance(problem, remedies.Problem) for problem in left) and len(left) <= len(found) - len(of_sizes)

  texts = [problem.what if isinstance(problem, remedies.Problem) else problem for problem in found]
  if not remedies.are_wanted():
    return texts
  enough: dict[Any, remedies.Remedy] = {}  # the first of each kind
  for remedy in of_sizes[0].remedies if len(of_sizes) == 1 else ():
    if len(enough) < _MOST_REMEDIES and _kind(config, remedy) not in enough and accepts(remedy.values):
      enough[_kind(config, remedy)] = remedy
  if enough:
    return [str(remedies.Problem(each.what, *enough.values())) if each is of_sizes[0] else each for each in found]
  if (proposal := next(filter(accepts, candidates.pipelines(config, given or {})), None)) is None:
    change = "Set pipeline_impl=host, or change" if derived.runs_ours(config) else "Change"
    instead = (
        f"No sizes fit these devices. {change} the batch or the number of devices."
        if derived.num_stages(config) == 1
        else "No pipeline of this model fits these devices: set pipeline_impl=host and train without one, or change "
        "base_num_decoder_layers or the number of devices."
    )
  else:
    instead = f"Set{', together:' if len(proposal) > 1 else ''} {remedies.settings(proposal)}."
    instead += _of_layers_outside(config, proposal, accepts, given or {})
  last = max(i for i, problem in enumerate(found) if isinstance(problem, remedies.Problem))
  texts[last] += f" {instead}"
  return texts

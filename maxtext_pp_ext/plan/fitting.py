# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""What would make a model fit into its devices, if no candidate of a plan does. Each change is estimated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
import dataclasses
from typing import Any

from maxtext_pp_ext.config.view import plain
from maxtext_pp_ext.host.topology import topologies

# How often the batch is halved, and the devices are doubled.
_MOST_HALVINGS, _MOST_DOUBLINGS = 8, 6
# Keys that make a state smaller, with the value to try. They change what is trained, by rounding.
_NARROWER = ("mu_dtype", "pipeline_grad_accum_dtype", "weight_dtype")
_NARROW = "bfloat16"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Way:
  """A change of some keys, and the memory that the model needs after it."""

  keys: dict[str, Any]  # the keys with their new values
  before: dict[str, Any]  # their values in the run
  memory: int  # bytes of a device that the smallest candidate needs then
  candidate: dict[str, Any]  # the keys of that candidate
  missing: int  # bytes by which that is too much; 0 if it fits


def ways(config: Any, limit: int, smallest: Callable[[dict[str, Any]], Any], more_devices: Any) -> list[Way]:
  """Returns changes with which the model needs less memory: the batch, narrower states, and more devices; then several.

  `config` has no pipeline, and a device has `limit` bytes. `smallest` returns the candidate that needs least memory with
  these values for keys, or None. `more_devices` is the result of that function.
  """

  def tried(keys: dict[str, Any]) -> Way | None:
    if (candidate := smallest(keys)) is None:
      return None
    peak = candidate.costs.peak
    before = {key: _value(config, key) for key in keys}
    return Way(keys=keys, before=before, memory=peak, candidate=candidate.keys, missing=max(peak - limit, 0))

  def first_that_fits(several: Iterator[dict[str, Any]]) -> Way | None:
    best = None
    for keys in several:
      if (way := tried(keys)) is None:
        break
      if best is None or way.memory < best.memory:
        best = way
      if not way.missing:
        break
    return best

  unchanged = tried({})
  batch = first_that_fits(_batches(config))
  # A key is wide if it has a type of more than two bytes, or one that follows from others.
  wide = [key for key in _NARROWER if _value(config, key) in (None, "", "auto", "float32")]
  narrower = [tried({key: _NARROW}) for key in wide]
  devices = first_that_fits(more_devices)
  found = [way for way in (batch, *narrower, devices) if way and (unchanged is None or way.memory < unchanged.memory)]
  if len(found) > 1 and all(way.missing for way in found):
    together = tried({key: value for way in found for key, value in way.keys.items()})
    found += [together] if together and together.memory < min(way.memory for way in found) else []
  return sorted(found, key=lambda way: way.missing)


def _value(config: Any, key: str) -> Any:
  """A key's value as in a yml file; a dtype by its name."""
  value = plain(getattr(config, key, None))
  return value if value is None or isinstance(value, (str, int, float)) else str(value)


def _batches(config: Any) -> Iterator[dict[str, Any]]:
  size = config.per_device_batch_size
  for _ in range(_MOST_HALVINGS):
    size /= 2
    if size * config.num_target_devices < 1:
      return
    yield {"per_device_batch_size": size}


def more_devices(config: Any, topology: str | None, donor: str | None) -> Iterator[dict[str, Any]]:
  """Yields keys for twice as many devices as a run has, four times as many, and so on.

  `topology` is its compile_topology. `donor` is the key of the mesh axis within a slice that gets the devices; None if
  MaxText derives its size.
  """
  for factor in (2**doubling for doubling in range(1, _MOST_DOUBLINGS + 1)):
    if topology:
      kind, _, size = topology.partition("-")
      larger = f"{kind}-{int(size) * factor}" if size.isdigit() else ""
      if larger not in topologies():
        return
      keys: dict[str, Any] = {"compile_topology": larger}
    else:
      keys = {"internal_compile_num_devices": config.num_target_devices * factor}
    yield keys if donor is None else keys | {donor: getattr(config, donor) * factor}

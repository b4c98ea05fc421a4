# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""What would make a model fit into its devices, if no candidate of a plan does. Each change is estimated."""

from collections.abc import Callable, Iterator
import dataclasses
from typing import Any

from maxtext_pp_ext.config.view import plain
from maxtext_pp_ext.host.rules import candidates

# Keys that make a state smaller, with the value to try. They change what is trained, by rounding.
_NARROWER = ("mu_dtype", "pipeline_grad_accum_dtype", "weight_dtype")
_NARROW = "bfloat16"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Remedy:
  """A change of some keys, and the memory that the model needs after it."""

  keys: dict[str, Any]  # the keys with their new values
  before: dict[str, Any]  # their values in the run
  memory: int  # bytes of a device that the smallest candidate needs then
  candidate: dict[str, Any]  # the keys of that candidate
  missing: int  # bytes that a device, and its host, lack then; 0 if it fits


def remedies(
    config: Any,
    missing: Callable[[Any], tuple[int, int]],
    smallest: Callable[[dict[str, Any]], Any],
    more_devices: Iterator[dict[str, Any]],
) -> list[Remedy]:
  """Returns changes with which the model needs less memory: the batch, narrower states, and more devices; then several.

  `config` has no pipeline. `missing` says what costs lack (`Plan.missing`). `smallest` returns the candidate that
  needs least memory with these values for keys, or None. `more_devices` is the result of `candidates.more_devices`.
  """

  def tried(keys: dict[str, Any]) -> Remedy | None:
    if (candidate := smallest(keys)) is None:
      return None
    peak = candidate.costs.peak
    before = {key: _value(config, key) for key in keys}
    lacks = sum(missing(candidate.costs))
    return Remedy(keys=keys, before=before, memory=peak, candidate=candidate.keys, missing=lacks)

  def first_that_fits(several: Iterator[dict[str, Any]]) -> Remedy | None:
    best = None
    for keys in several:
      if (remedy := tried(keys)) is None:
        break
      if best is None or _needs(remedy) < _needs(best):
        best = remedy
      if not remedy.missing:
        break
    return best

  unchanged = tried({})
  batch = first_that_fits(candidates.smaller_batches(config))
  # A key is wide if it has a type of more than two bytes, or one that follows from others.
  wide = [key for key in _NARROWER if _value(config, key) in (None, "", "auto", "float32")]
  narrower = [tried({key: _NARROW}) for key in wide]
  devices = first_that_fits(more_devices)
  found = [each for each in (batch, *narrower, devices) if each and (not unchanged or _needs(each) < _needs(unchanged))]
  if len(found) > 1 and all(remedy.missing for remedy in found):
    together = tried({key: value for remedy in found for key, value in remedy.keys.items()})
    found += [together] if together and _needs(together) < min(map(_needs, found)) else []
  return sorted(found, key=lambda remedy: remedy.missing)


def _needs(remedy: Remedy) -> tuple[int, int]:
  return remedy.missing, remedy.memory


def _value(config: Any, key: str) -> Any:
  """A key's value as in a yml file; a dtype by its name."""
  value = plain(getattr(config, key, None))
  return value if value is None or isinstance(value, (str, int, float)) else str(value)

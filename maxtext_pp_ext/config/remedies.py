# Copyright 2026 The maxtext_pp_ext Authors.
# SPDX-License-Identifier: Apache-2.0
"""Problems with their remedies, and a config with other values, as MaxText would derive it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
import contextlib
import contextvars
import dataclasses
from typing import Any

from maxtext_pp_ext.config import derived
from maxtext_pp_ext.config.host_keys import HostKeys
from maxtext_pp_ext.config.view import with_values

# The keys whose given values MaxText replaces by derived ones.
DERIVED = ("pipeline_parallel_layers", "num_pipeline_repeats", "num_pipeline_microbatches")
# Key of a batch size -> the number of rows that MaxText derives from it.
BATCHES = {
    "per_device_batch_size": "micro_batch_size_to_train_on",
    "eval_per_device_batch_size": "micro_batch_size_to_eval_on",
}

Values = Mapping[str, Any]
LEAVE_OUT = "Leave out pipeline_impl, or set pipeline_impl=host, for MaxText's own pipeline."
_wanted = contextvars.ContextVar("_wanted", default=True)


@contextlib.contextmanager
def not_wanted() -> Iterator[None]:
  """Problems are told without remedies, which can take seconds to find. For a caller that tries other values itself."""
  token = _wanted.set(False)
  try:
    yield
  finally:
    _wanted.reset(token)


def are_wanted() -> bool:
  return _wanted.get()


@dataclasses.dataclass(frozen=True)
class Remedy:
  """Values for keys that may solve a problem."""

  values: Values
  remark: str = ""  # for the text


class Problem(str):
  """A problem with the sizes of a pipeline. Its text lists its remedies, whether or not each alone is enough."""

  what: str  # the problem, with the keys and their values
  remedies: tuple[Remedy, ...]

  def __new__(cls, what: str, *remedies: Remedy | Values, otherwise: str = "") -> Problem:
    """`otherwise` is a general remedy for the text, used instead of `remedies`. Values are a remedy without a remark."""
    each = tuple(remedy if isinstance(remedy, Remedy) else Remedy(remedy) for remedy in remedies)
    text = otherwise or " or ".join(settings(remedy.values) + remedy.remark for remedy in each)
    self = super().__new__(cls, f"{what} Set {text}." if text else what)
    self.what, self.remedies = what, each
    return self


def settings(values: Values) -> str:
  """key=value, as on MaxText's command line."""
  return ", ".join(f"{key}={value_text(value)}" for key, value in values.items())


def value_text(value: Any) -> str:
  return f"{value:.17g}" if isinstance(value, float) else str(value)


def changed[C: HostKeys](config: C, values: Values, given: Values | None = None) -> C:
  """A config with these values, and everything that MaxText derives from them and a pipeline's sizes depend on.

  `given` has the user's values of `DERIVED` and of parallelism, if the config holds derived values instead.
  """
  view: dict[str, Any] = {key: value for key, value in (given or {}).items() if key in DERIVED} | dict(values)
  for network in derived.NETWORKS:
    if getattr(config, f"{network}_parallelism", None) is not None:
      sizes = derived.parallelism(config, network)
      own = [values.get(derived.parallelism_key(network, axis), size) for axis, size in sizes.items()]
      view[f"{network}_parallelism"] = own
  for key, rows in BATCHES.items():
    if key in values and config.num_target_devices:
      view[rows] = int(config.num_target_devices * values[key])
  found = with_values(config, view)
  if found.pipeline_parallel_layers == -1 and derived.layers_to_choose_from(found) is not None:
    view["pipeline_parallel_layers"] = derived.layers_to_choose_from(found)
  if found.num_pipeline_microbatches == -1 and derived.num_stages(found):
    view["num_pipeline_microbatches"] = derived.least_microbatches(found)
  return with_values(config, view)
